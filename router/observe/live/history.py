"""One point per second for the last minutes, for new viewers."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from tandem.router.observe.histograms import Histogram

NUM_POINTS = 300
# Window of a point's quantiles: one second has few requests.
WINDOW_S = 10


class Point(NamedTuple):
    """Quantiles are in milliseconds, None without values.

    Attributes:
        at_s: seconds since the epoch.
        num_requests, num_queued: requests in hand, and requests without a first token, at all routers.
    """

    number: int
    at_s: float
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    num_requests: int
    num_queued: int


class Quantiles:
    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._before: deque[tuple[int, ...]] = deque([histogram.counts()], maxlen=WINDOW_S)

    def next(self) -> tuple[float | None, float | None]:
        """Returns median and 99th percentile in milliseconds. Call once a second."""
        counts = self._histogram.counts()
        lately = [new - old for new, old in zip(counts, self._before[0], strict=True)]
        self._before.append(counts)
        return quantile(self._histogram.bounds, lately, 0.5), quantile(self._histogram.bounds, lately, 0.99)


class History:
    def __init__(self, ttft: Histogram, itl: Histogram) -> None:
        self._ttft, self._itl = Quantiles(ttft), Quantiles(itl)
        self._points: deque[Point] = deque(maxlen=NUM_POINTS)
        self.num_points = 0

    def add(
        self,
        at_s: float,
        *,
        prompt_tokens_per_s: float,
        output_tokens_per_s: float,
        num_requests: int,
        num_queued: int,
    ) -> None:
        """Call once a second."""
        self.num_points += 1
        self._points.append(
            Point(
                self.num_points,
                at_s,
                *self._ttft.next(),
                *self._itl.next(),
                prompt_tokens_per_s,
                output_tokens_per_s,
                num_requests,
                num_queued,
            )
        )

    def since(self, number: int) -> Iterator[Point]:
        return (point for point in self._points if point.number > number)


def quantile(bounds: Sequence[float], counts: Sequence[int], q: float) -> float | None:
    """Returns a quantile in milliseconds, or None without values. As in Prometheus, values lie evenly within a bucket.

    Args:
        counts: values per bucket, then values above all bounds.
    """
    totals = list(accumulate(counts))
    if not totals[-1]:
        return None
    rank = q * totals[-1]
    index = next(i for i, total in enumerate(totals) if total >= rank)
    if index == len(bounds):
        return bounds[-1] * 1e3
    low = bounds[index - 1] if index else 0.0
    below = totals[index - 1] if index else 0
    return (low + (bounds[index] - low) * (rank - below) / counts[index]) * 1e3
