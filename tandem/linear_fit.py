"""Seconds as a linear function of a few numbers, learned from what is observed lately."""

from collections.abc import Sequence

# That the factors are those of the start counts as one observation at first, and as this in the end: where all
# observations are alike they cannot be told apart otherwise.
START_WEIGHT = 0.01


class LinearFit:
    """Least squares of relative errors, over observations that count for less the older they are. As long as there are
    few, or where all are alike, it stays near the factors that it began with."""

    def __init__(self, start: Sequence[float], memory: float = 64.0) -> None:
        """
        Args:
            start: the factors as long as nothing has been observed, all positive.
            memory: of so many observations back one counts for 1/e.
        """
        self._start = tuple(start)
        self._decay = 1.0 - 1.0 / memory
        size = len(self._start)
        # Each factor is looked for as a multiple of its start, and each observation is divided by what those say of it.
        self._products = [[0.0] * size for _ in range(size)]
        self._targets = [0.0] * size
        self._weight = 1.0
        self._factors: tuple[float, ...] | None = self._start

    def observe(self, numbers: Sequence[float], seconds: float) -> None:
        parts = [factor * number for factor, number in zip(self._start, numbers, strict=True)]
        expected = sum(parts)
        shares, ratio, decay = [part / expected for part in parts], seconds / expected, self._decay
        for i, share in enumerate(shares):
            row = self._products[i]
            for j, other in enumerate(shares):
                row[j] = decay * row[j] + share * other
            self._targets[i] = decay * self._targets[i] + share * ratio
        self._weight = max(START_WEIGHT, decay * self._weight)
        self._factors = None

    @property
    def factors(self) -> tuple[float, ...]:
        """What each number is multiplied with; never negative."""
        if self._factors is None:
            multiples = self._multiples(list(range(len(self._start))))
            self._factors = tuple(multiples.get(i, 0.0) * start for i, start in enumerate(self._start))
        return self._factors

    def copy(self) -> "LinearFit":
        """Another that knows the same and learns by itself."""
        other = LinearFit(self._start)
        other._decay, other._weight, other._factors = self._decay, self._weight, self._factors
        other._products = [row[:] for row in self._products]
        other._targets = self._targets[:]
        return other

    def _multiples(self, chosen: list[int]) -> dict[int, float]:
        """Args: chosen: which of them are not 0."""
        rows = [
            [self._products[i][j] + (self._weight if i == j else 0.0) for j in chosen]
            + [self._targets[i] + self._weight]
            for i in chosen
        ]
        found = dict(zip(chosen, _solve(rows), strict=True))
        least = min(found, key=found.__getitem__)
        if found[least] >= 0.0:
            return found
        return self._multiples([i for i in chosen if i != least])


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
