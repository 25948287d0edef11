"""Seconds as a linear function of a few numbers, learned from what is observed lately."""

from collections.abc import Sequence


class LinearFit:
    """Least squares over observations that count for less the older they are. As long as there are few, or where all
    are alike, it stays near the values that it began with."""

    def __init__(self, start: Sequence[float], scales: Sequence[float], memory: float = 64.0) -> None:
        """
        Args:
            start: the factors as long as nothing has been observed.
            scales: what each number is like, so that one that is large does not count for more.
            memory: of so many observations back one counts for 1/e.
        """
        self._start = [factor * scale for factor, scale in zip(start, scales, strict=True)]
        self._scales = tuple(scales)
        self._decay = 1.0 - 1.0 / memory
        size = len(self._start)
        # That the factors are those of the start counts as one observation of each.
        self._products = [[0.0] * size for _ in range(size)]
        self._errors = [0.0] * size
        self._factors: tuple[float, ...] | None = None

    def observe(self, numbers: Sequence[float], seconds: float) -> None:
        scaled = [number / scale for number, scale in zip(numbers, self._scales, strict=True)]
        error = seconds - sum(factor * number for factor, number in zip(self._start, scaled, strict=True))
        decay = self._decay
        for i, number in enumerate(scaled):
            row = self._products[i]
            for j, other in enumerate(scaled):
                row[j] = decay * row[j] + number * other
            self._errors[i] = decay * self._errors[i] + number * error
        self._factors = None

    @property
    def factors(self) -> tuple[float, ...]:
        """What each number is multiplied with; never negative."""
        if self._factors is None:
            size = len(self._start)
            rows = [[self._products[i][j] + (i == j) for j in range(size)] + [self._errors[i]] for i in range(size)]
            changes = _solve(rows)
            self._factors = tuple(
                max(0.0, (start + change) / scale)
                for start, change, scale in zip(self._start, changes, self._scales, strict=True)
            )
        return self._factors

    def copy(self) -> "LinearFit":
        """Another that knows the same and learns by itself."""
        other = LinearFit([0.0] * len(self._start), self._scales)
        other._start = self._start
        other._decay = self._decay
        other._products = [row[:] for row in self._products]
        other._errors = self._errors[:]
        return other


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
