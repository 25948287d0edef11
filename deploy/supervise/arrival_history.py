"""Estimates the rate of arrivals, and its trend."""

import math
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

# Windows in seconds, shortest first.
WINDOWS = (5, 10, 20, 40, 80, 160, 320)
# Windows of trends, in seconds.
TRENDS = (20, 40, 80)
# Deviations of a Poisson distribution beyond which a window's count or slope counts as a change.
CHANGED = 4.0


class Rate(NamedTuple):
    """Arrivals per second.

    Attributes:
        now: current rate.
        slope: its change per second; 0: constant, or changed at once.
        seen_s: window of this estimate, in seconds.
    """

    now: float = 0.0
    slope: float = 0.0
    seen_s: float = 0.0

    def after(self, seconds: float) -> float:
        """Returns the rate expected in `seconds`. A trend is expected to last as long again as it has been seen."""
        return max(0.0, self.now + self.slope * min(seconds, self.seen_s))


class ArrivalHistory:
    """Counts arrivals by the second.

    The rate is the mean of the longest window that agrees with all shorter ones. So it is exact at constant load, and
    follows a jump within seconds. A trend counts if a line fits its window better than a jump does.
    """

    def __init__(self) -> None:
        # Newest last.
        self._counts: deque[float] = deque(maxlen=WINDOWS[-1])
        self._filled_s = 0.0

    def add(self, count: float, elapsed_s: float) -> None:
        """Args: elapsed_s: seconds since the last call, above 0."""
        rate = count / elapsed_s
        left_s = min(elapsed_s, float(WINDOWS[-1]))
        while left_s > 0:
            if not self._counts or self._filled_s >= 1.0:
                self._counts.append(0.0)
                self._filled_s = 0.0
            part_s = min(left_s, 1.0 - self._filled_s)
            self._counts[-1] += rate * part_s
            self._filled_s += part_s
            left_s -= part_s
            if 1.0 - self._filled_s < 1e-9:
                self._filled_s = 1.0

    def rate(self) -> Rate:
        counts = list(self._counts)
        if not counts:
            return Rate()
        # The newest second is not over.
        partial = self._filled_s < 1.0 and len(counts) > 1
        whole = counts[:-1] if partial else counts
        newest_first = list(accumulate(reversed(whole)))
        if (trend := _trend(whole)) is not None:
            return trend
        return self._level(newest_first)

    @staticmethod
    def _level(newest_first: Sequence[float]) -> Rate:
        chosen = min(WINDOWS[0], len(newest_first))
        for window in dict.fromkeys(min(window, len(newest_first)) for window in WINDOWS):
            rate = newest_first[window - 1] / window
            shorter = [length for length in WINDOWS if length < window]
            if any(_differs(newest_first[length - 1], rate * length) for length in shorter):
                break
            chosen = window
        return Rate(newest_first[chosen - 1] / chosen, 0.0, float(chosen))


def _differs(count: float, expected: float) -> bool:
    # The square root of a Poisson number has a deviation of 1/2.
    return abs(math.sqrt(count) - math.sqrt(expected)) > CHANGED / 2


def _trend(counts: Sequence[float]) -> Rate | None:
    """Returns the trend in the shortest window that has one."""
    for window in TRENDS:
        if len(counts) < window:
            return None
        recent = counts[-window:]
        mean = sum(recent) / window
        if mean <= 0:
            continue
        middle = (window - 1) / 2
        spread = window * (window * window - 1) / 12
        slope = sum((index - middle) * count for index, count in enumerate(recent)) / spread
        if abs(slope) < CHANGED * math.sqrt(mean / spread):
            continue
        if slope * slope * spread > _explained_by_jump(recent):
            return Rate(max(0.0, mean + slope * window / 2), slope, float(window))
        return None
    return None


def _explained_by_jump(counts: Sequence[float]) -> float:
    """Returns the most of the sum of squares around the mean that one jump explains."""
    total, number = sum(counts), len(counts)
    best = before = 0.0
    for index, count in enumerate(counts[:-1], 1):
        before += count
        after = total - before
        best = max(best, before * before / index + after * after / (number - index))
    return best - total * total / number
