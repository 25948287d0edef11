"""Requests as their clients saw them, and measures of them."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Limits(NamedTuple):
    """Limits of a good request: on its TTFT, and on 95 % of its gaps."""

    ttft_s: float
    itl_s: float


# Share of gaps that may be longer.
SLOW_SHARE = 0.05


@dataclass(eq=False, slots=True)
class Seen:
    """
    Attributes:
        at: arrival.
        ttft_s: None: it has no token.
        num_gaps, num_slow: gaps between its tokens, and those beyond the limit.
        ended_at: None: it has not ended.
    """

    at: float
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_s: float | None = None
    num_gaps: int = 0
    num_slow: int = 0
    num_attempts: int = 0
    ended_at: float | None = None
    failure: str = ""

    def is_good(self, limits: Limits) -> bool:
        if self.ended_at is None or self.failure or self.ttft_s is None:
            return False
        return self.ttft_s <= limits.ttft_s and self.num_slow <= int(SLOW_SHARE * self.num_gaps)


def good_share(requests: Sequence[Seen], limits: Limits) -> float:
    """Returns 1.0 without requests."""
    return num_good(requests, limits) / len(requests) if requests else 1.0


def num_good(requests: Iterable[Seen], limits: Limits) -> int:
    return sum(request.is_good(limits) for request in requests)


def between(requests: Sequence[Seen], begin: float, end: float) -> Sequence[Seen]:
    """Returns the arrivals of a window. Args: requests: by arrival."""
    places = [bisect_left(requests, moment, key=lambda seen: seen.at) for moment in (begin, end)]
    return requests[places[0] : places[1]]


def ttft_at(requests: Iterable[Seen], percent: float) -> float:
    """Returns a percentile by nearest rank, in seconds; infinity if that request has no token."""
    times = sorted(float("inf") if seen.ttft_s is None else seen.ttft_s for seen in requests)
    return times[min(len(times) - 1, int(percent / 100 * len(times)))] if times else 0.0
