"""Times of decode steps with drafts, for the choice of their number. Imports no torch."""

from bisect import bisect_left
from collections.abc import Mapping


class DraftCosts:
    """Measured at the start of an engine, without contexts: a step reads these once, with drafts or without.

    A fit of served steps knows little of drafts before some are computed. Besides, time grows in steps with the rows.
    """

    def __init__(self, plain_s: Mapping[int, float], drafted_s: Mapping[int, float]) -> None:
        """Args: seconds of steps by their rows, without and with drafts; a step takes the time of the next size."""
        self._plain_s, self._drafted_s = dict(plain_s), dict(drafted_s)
        self._plain_sizes, self._drafted_sizes = sorted(plain_s), sorted(drafted_s)

    def extra_s(self, num_requests: int, num_drafts: int) -> float:
        """Returns the seconds that drafts add to a step. Args: num_drafts: of all requests, at least 1."""
        plain = _next(self._plain_sizes, num_requests)
        drafted = _next(self._drafted_sizes, num_requests + num_drafts)
        return max(0.0, self._drafted_s[drafted] - self._plain_s[plain])


def _next(sizes: list[int], num_rows: int) -> int:
    return sizes[min(bisect_left(sizes, num_rows), len(sizes) - 1)]
