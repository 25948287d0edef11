"""Estimates the rate of arrivals, and its trend."""

import math
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

# Windows in seconds, shortest first.
WINDOWS = (5, 10, 20, 40, 80, 160, 320)
# Windows of trends, in seconds.
TRENDS = (20, 40, 80, 160, 320)
# Deviations of a Poisson distribution, and share, beyond both of which a window's count or slope counts as a change.
CHANGED, LEAST_CHANGE = 3.7, 0.1
RECENT_S = 20
# Bins whose differences show how much more arrivals vary than a Poisson distribution, in seconds, and the share of the
# largest differences that are jumps.
BIN_S, JUMPS = 5, 0.06


class Rate(NamedTuple):
    """Arrivals per second.

    Attributes:
        now: current rate.
        slope: its change per second; 0: constant, or changed at once.
        seen_s: window of this estimate, in seconds.
        deviation: standard error of `now`.
        recent: mean over RECENT_S, less its standard error beyond that of a Poisson distribution.
    """

    now: float = 0.0
    slope: float = 0.0
    seen_s: float = 0.0
    deviation: float = 0.0
    recent: float = 0.0

    def after(self, seconds: float) -> float:
        """Returns the rate expected in `seconds`. A trend is expected to last as long again as it has been seen."""
        return max(0.0, self.now + self.slope * min(seconds, self.seen_s))


class ArrivalHistory:
    """Counts arrivals by the second.

    The rate is the mean of the longest window that agrees with all shorter ones. So it is steady at constant load, and
    follows a jump within seconds. A trend counts if a line fits its window better than a jump does.
    """

    def __init__(self, now: float) -> None:
        # Counts by second, newest last. The newest second is not over.
        self._counts: deque[float] = deque([0.0], maxlen=WINDOWS[-1] + 1)
        self._newest = math.floor(now)
        self._rate: Rate | None = Rate()

    def pass_time(self, now: float) -> None:
        newest = math.floor(now)
        if newest == self._newest:
            return
        self._rate = None
        self._counts.extend([0.0] * min(newest - self._newest, WINDOWS[-1] + 1))
        self._newest = newest

    def add(self, count: float, elapsed_s: float, now: float) -> None:
        """Args: elapsed_s: seconds up to now in which `count` requests arrived."""
        if not count:
            return
        if elapsed_s <= 0:
            self._counts[-1] += count
            return
        began = now - elapsed_s
        for second in range(max(math.floor(began), self._newest - len(self._counts) + 1), self._newest + 1):
            within_s = min(now, second + 1) - max(began, second)
            self._counts[second - self._newest - 1] += count * max(0.0, within_s) / elapsed_s

    def rate(self) -> Rate:
        """Returns the rate of the seconds that are over."""
        if self._rate is None:
            whole = list(self._counts)[:-1]
            spread = math.sqrt(_dispersion(whole))
            recent = sum(whole[-RECENT_S:])
            least = max(0.0, recent - (spread - 1.0) * math.sqrt(recent)) / RECENT_S
            self._rate = (_trend(whole, spread) or _level(whole, spread))._replace(recent=least)
        return self._rate


def _dispersion(counts: Sequence[float]) -> float:
    """Returns the variance of counts in multiples of a Poisson distribution's, at least 1. Clients may send in
    bursts."""
    bins = [sum(counts[begin : begin + BIN_S]) for begin in range(len(counts) % BIN_S, len(counts), BIN_S)]
    squares = sorted((one - other) ** 2 for one, other in pairwise(bins))
    kept = squares[: len(squares) - math.ceil(JUMPS * len(squares))]
    mean = sum(bins) / len(bins) if bins else 0.0
    return max(1.0, sum(kept) / len(kept) / (2 * mean)) if kept and mean > 0 else 1.0


def _level(counts: Sequence[float], spread: float) -> Rate:
    newest_first = list(accumulate(reversed(counts)))
    chosen = min(WINDOWS[0], len(counts))
    for window in dict.fromkeys(min(window, len(counts)) for window in WINDOWS):
        rate = newest_first[window - 1] / window
        if any(_differs(newest_first[shorter - 1], rate * shorter, spread) for shorter in WINDOWS if shorter < window):
            break
        chosen = window
    count = newest_first[chosen - 1]
    return Rate(count / chosen, 0.0, float(chosen), spread * math.sqrt(count) / chosen)


def _differs(count: float, expected: float, spread: float) -> bool:
    if abs(count - expected) <= LEAST_CHANGE * expected:
        return False
    # The square root of a Poisson number has a deviation of 1/2.
    return abs(math.sqrt(count) - math.sqrt(expected)) > spread * CHANGED / 2


def _trend(counts: Sequence[float], spread: float) -> Rate | None:
    """Returns the trend in the shortest window that has one."""
    # Sums over the counts before each index, and of these sums.
    sums = [0.0, *accumulate(counts)]
    sums_of_sums = [0.0, *accumulate(sums)]
    for window in TRENDS:
        if len(counts) < window:
            return None
        begin = len(counts) - window
        mean = (sums[-1] - sums[begin]) / window
        if mean <= 0:
            continue
        middle = (window - 1) / 2
        squares = window * (window * window - 1) / 12
        # Sum of each count times its index in the window.
        moment = window * sums[-1] - (sums_of_sums[-1] - sums_of_sums[begin + 1])
        slope = (moment - middle * mean * window) / squares
        if abs(slope) < max(spread * CHANGED * math.sqrt(mean / squares), LEAST_CHANGE * mean / window):
            continue
        if slope * slope * squares <= _explained_by_jump(counts[begin:]):
            return None
        # The end of a line is twice as uncertain as its mean.
        deviation = 2 * spread * math.sqrt(mean / window)
        return Rate(max(0.0, mean + slope * window / 2), slope, float(window), deviation)
    return None


def _explained_by_jump(counts: Sequence[float]) -> float:
    """Returns the most of the sum of squares around the mean that one jump explains."""
    total, number = sum(counts), len(counts)
    best = 0.0
    for index, before in enumerate(accumulate(counts[:-1]), 1):
        best = max(best, before * before / index + (total - before) ** 2 / (number - index))
    return best - total * total / number
