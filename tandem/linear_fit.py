"""Online fit of durations as a linear function of a few numbers."""

import math
from collections.abc import Mapping, Sequence

# Weight of the usual factors without observations, and with many. It separates factors if all observations are alike.
USUAL_WEIGHT, LEAST_WEIGHT = 0.1, 0.01
# Longer observations are clipped to this multiple of the expected time.
OUTLIER = 4.0
# Floor of the expectation for that clip, relative to the start.
LEAST_EXPECTED = 0.05
# Time constant of the decay without observations, in seconds.
FORGETTING_S = 20.0
# Time constant of the usual factors' geometric means, in seconds, and their floor relative to the start.
USUAL_S = 120.0
LEAST_USUAL = 1e-3
# Time constant of the return to the start, on a logarithmic scale, of a factor unobserved for longer than USUAL_S, so
# that a slow worker is tried again.
FORGIVEN_S = 600.0
# Directions with less remaining weight are unknown; dividing by it would overflow.
LEAST_KNOWN = 1e-9
# Observations between two solutions at most, for the outlier clip.
MAX_UNREAD = 8


class LinearFit:
    """Recursive least squares of relative errors.

    An observation's weight decays with newer ones of its kind and with time. With few or uniform observations the
    factors stay near their usual values: first the start, later a mean over minutes, so that one slow period is
    forgotten.
    """

    def __init__(self, start: Sequence[float], memory: float = 64.0) -> None:
        """
        Args:
            start: initial factors, all positive.
            memory: number of observations after which a weight has decayed to 1/e.
        """
        self._start = tuple(start)
        self._lost = 1.0 / memory
        size = len(self._start)
        # Factors are fitted as multiples of their start; observations are divided by the start's prediction.
        self._products = [[0.0] * size for _ in range(size)]
        self._targets = [0.0] * size
        self._usual = [1.0] * size
        self._weight = USUAL_WEIGHT
        self._multiples = [1.0] * size
        self._num_observed = 0
        self._num_unread = 0
        # Factors observed since `pass_time`, and each factor's time without observations.
        self._seen: set[int] = set()
        self._unseen_s = [0.0] * size

    @property
    def has_observed(self) -> bool:
        return self._num_observed > 0

    def observe(self, numbers: Sequence[float], seconds: float) -> None:
        parts = [factor * number for factor, number in zip(self._start, numbers, strict=True)]
        expected = sum(parts)
        shares = {i: part / expected for i, part in enumerate(parts) if part}
        if self._num_unread >= min(MAX_UNREAD, 1 + self._num_observed // 4):
            self._solve()
        multiple = sum(share * self._multiples[i] for i, share in shares.items())
        ratio = min(seconds / expected, OUTLIER * max(multiple, LEAST_EXPECTED))
        self._forget(shares)
        for i, share in shares.items():
            row = self._products[i]
            for j, other in shares.items():
                row[j] += share * other
            self._targets[i] += share * ratio
        self._weight = max(LEAST_WEIGHT, (1.0 - self._lost) * self._weight)
        self._num_observed += 1
        self._num_unread += 1
        self._seen.update(shares)

    def pass_time(self, seconds: float) -> None:
        """Decay the observations by `seconds` since the previous call."""
        if self._num_unread:
            self._solve()
        unforgiven = math.exp(-seconds / FORGIVEN_S)
        for i, usual in enumerate(self._usual):
            self._unseen_s[i] += seconds
            if i in self._seen:
                usually = 1.0 - math.exp(-min(self._unseen_s[i], USUAL_S) / USUAL_S)
                self._usual[i] *= (max(LEAST_USUAL, self._multiples[i]) / usual) ** usually
                self._unseen_s[i] = 0.0
            elif self._unseen_s[i] > USUAL_S:
                self._usual[i] = usual**unforgiven
        self._seen.clear()
        kept = math.exp(-seconds / FORGETTING_S)
        self._products = [[kept * product for product in row] for row in self._products]
        self._targets = [kept * target for target in self._targets]
        self._weight = USUAL_WEIGHT - kept * (USUAL_WEIGHT - self._weight)
        self._num_unread += 1

    @property
    def factors(self) -> tuple[float, ...]:
        if self._num_unread:
            self._solve()
        return tuple(multiple * start for multiple, start in zip(self._multiples, self._start, strict=True))

    def _forget(self, shares: Mapping[int, float]) -> None:
        """Decay only the direction of an observation: steps without prompts must not erase the fit for prompts."""
        towards = [sum(row[i] * share for i, share in shares.items()) for row in self._products]
        known = sum(towards[i] * share for i, share in shares.items())
        if known <= LEAST_KNOWN:
            return
        target = sum(self._targets[i] * share for i, share in shares.items())
        for i, one in enumerate(towards):
            if one:
                lost, row = self._lost / known * one, self._products[i]
                for j, other in enumerate(towards):
                    row[j] -= lost * other
                self._targets[i] -= lost * target

    def _solve(self) -> None:
        self._num_unread = 0
        found = self._solve_for(list(range(len(self._start))))
        self._multiples = [found.get(i, 0.0) for i in range(len(self._start))]

    def _solve_for(self, chosen: list[int]) -> dict[int, float]:
        """Solve for a subset of factors, dropping negative ones."""
        weight = self._weight
        rows = [
            [self._products[i][j] + (weight if i == j else 0.0) for j in chosen]
            + [self._targets[i] + weight * self._usual[i]]
            for i in chosen
        ]
        found = dict(zip(chosen, _solve(rows), strict=True))
        least = min(found, key=found.__getitem__)
        if found[least] >= 0.0:
            return found
        return self._solve_for([i for i in chosen if i != least])


def _solve(rows: list[list[float]]) -> list[float]:
    """Solve linear equations, given as rows with their right side last. The matrix is positive definite."""
    size = len(rows)
    for i in range(size):
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            for j in range(i, size + 1):
                rows[k][j] -= factor * rows[i][j]
    solution = [0.0] * size
    for i in reversed(range(size)):
        rest = rows[i][size] - sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = rest / rows[i][i]
    return solution
