"""Seconds as a linear function of a few numbers, learned from what is observed lately."""

import math
from collections.abc import Mapping, Sequence

# That the factors are the usual ones counts as so much of an observation as long as there are none, and where there are
# many: where all observations are alike, factors cannot be told apart otherwise.
USUAL_WEIGHT, LEAST_WEIGHT = 0.1, 0.01
# What takes longer than so many times what is expected counts as no more than that: it was something else that did.
OUTLIER = 4.0
# Of what was expected at first; what takes less is no reason to take the next one for an outlier.
LEAST_EXPECTED = 0.05
# What was observed so long ago counts for 1/e of what it did, if nothing has been observed since.
FORGETTING_S = 20.0
# The usual factors are geometric means over so long a time. A factor of less than this multiple of what it was at first
# counts as that.
USUAL_S = 120.0
LEAST_USUAL = 1e-3
# Of a factor of which nothing has been observed for longer than USUAL_S, so much time leaves 1/e of how many times its
# start it usually is, on a logarithmic scale: who was slow for so long that it has become usual is asked again.
FORGIVEN_S = 600.0
# Of a direction of which so little of an observation is left nothing is known. What is forgotten on and on comes to a
# number so small that nothing can be divided by it.
LEAST_KNOWN = 1e-9
# The factors by which outliers are told are no older than so many observations.
MAX_UNREAD = 8


class LinearFit:
    """Least squares of relative errors. An observation counts for less the more of its kind there are since, and the
    older it is. As long as there are few, or where all are alike, the factors stay near the usual ones: those that it
    began with at first, and then a mean of minutes, so that a slow time is forgotten by who is not asked meanwhile."""

    def __init__(self, start: Sequence[float], memory: float = 64.0) -> None:
        """
        Args:
            start: the factors as long as nothing has been observed, all positive.
            memory: of so many observations back one counts for 1/e.
        """
        self._start = tuple(start)
        self._lost = 1.0 / memory
        size = len(self._start)
        # Each factor is looked for as a multiple of its start, and each observation is divided by what those say of it.
        self._products = [[0.0] * size for _ in range(size)]
        self._targets = [0.0] * size
        self._usual = [1.0] * size
        self._weight = USUAL_WEIGHT
        self._multiples = [1.0] * size
        self._num_observed = 0
        self._num_unread = 0
        # Those that something was learned of since `pass_time`, and for how long there was nothing of each.
        self._seen: set[int] = set()
        self._unseen_s = [0.0] * size

    @property
    def has_observed(self) -> bool:
        """Whether the factors are from anything but the start."""
        return self._num_observed > 0

    def observe(self, numbers: Sequence[float], seconds: float) -> None:
        """Args: numbers: what each factor is multiplied with; not all 0."""
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
        """So long after the last call, or the beginning."""
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
        """What each number is multiplied with; never negative."""
        if self._num_unread:
            self._solve()
        return tuple(multiple * start for multiple, start in zip(self._multiples, self._start, strict=True))

    def _forget(self, shares: Mapping[int, float]) -> None:
        """Makes room for an observation: of what is known of its direction a part is lost, and nothing of any other. A
        thousand steps without a prompt say nothing of what prompts take."""
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
        """Args: chosen: which of them are not 0."""
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
    """Solves linear equations, each a row with its right side last. The matrix is positive definite: no pivot is 0."""
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
