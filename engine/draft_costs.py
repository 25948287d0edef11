"""Times of decode steps with drafts, for the choice of their number. Imports no torch."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping


class DraftCosts:
    """Measured at the start of an engine, without contexts: a step reads these once, with drafts or without.

    A fit of served steps knows little of drafts before some are computed. Besides, time grows in steps with the rows.
    """

    def __init__(
        self, plain_s: Mapping[int, float], drafted_s: Mapping[int, float], pass_s: Mapping[int, float] | None = None
    ) -> None:
        """
        Args:
            plain_s, drafted_s: seconds of steps by their rows, without and with drafts; a step takes the time of the
                next size.
            pass_s: seconds of a drafter's passes by their rows, likewise; None: drafts are not made by a model.
        """
        self._plain_s, self._drafted_s, self._pass_s = dict(plain_s), dict(drafted_s), dict(pass_s or {})
        self._plain_sizes, self._drafted_sizes = sorted(plain_s), sorted(drafted_s)
        self._pass_sizes = sorted(self._pass_s)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._plain_s}, {self._drafted_s}, {self._pass_s})"

    def extras_s(self, num_requests: int, most: int) -> Iterator[tuple[int, float]]:
        """Yields numbers of drafts, up to `most`, and the seconds that they add to a step of so many requests.

        Of numbers that take the same time, only the largest. Ends at the largest size.
        """
        plain_s = self._plain_s[_next(self._plain_sizes, num_requests)]
        for size in self._drafted_sizes[bisect_right(self._drafted_sizes, num_requests) :]:
            num_drafts = min(most, size - num_requests)
            yield num_drafts, max(0.0, self._drafted_s[size] - plain_s)
            if num_drafts == most:
                return

    def pass_s(self, num_rows: int) -> float:
        """Returns the seconds of a drafter's pass over so many rows; 0 if not measured."""
        return self._pass_s[_next(self._pass_sizes, num_rows)] if self._pass_s else 0.0


def _next(sizes: list[int], num_rows: int) -> int:
    return sizes[min(bisect_left(sizes, num_rows), len(sizes) - 1)]
