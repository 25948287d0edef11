"""The best counts by window for arrivals that are known beforehand.

Each round replays the arrivals with the counts so far. A window with less than GOOD of its requests good gets a worker,
any other one loses a worker, unless it has failed with that number. Prompts too long for the TTFT limit do not count.
Starts begin early enough. So the oracle has our workers, routers and start time, but no surprises. Its counts are
found, not proven to be the least.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.elastic.clients import Arrival
from benchmarks.elastic.fleet import Setup
from benchmarks.elastic.outcome import between, good_share
from benchmarks.elastic.replay import Replay, replay
from benchmarks.elastic.sizers import Schedule, Sizer
from benchmarks.elastic.step_times import StepTimes
from benchmarks.elastic.work import alone_s, work_s

GOOD = 0.99
# Share of a worker's time that the first round fills.
FIRST_LOAD = 0.9


@dataclass(frozen=True, slots=True)
class Windows:
    """Attributes: low, high: bounds of the number of workers; rounds: number of replays."""

    kind: str
    window_s: float
    low: int
    high: int
    rounds: int = 4


@dataclass(frozen=True, slots=True)
class Oracle:
    """Attributes: counts: workers by window; cpu_s: of all rounds."""

    replay: Replay
    counts: list[int]
    cpu_s: float


def find_oracle(
    arrivals: Sequence[Arrival], times: StepTimes, setup: Setup, length_s: float, windows: Windows
) -> Oracle:
    """Returns the round with the most good requests, of nearly equal ones (GOOD) the one with the least GPU time."""
    counts = _first(arrivals, times, math.ceil(length_s / windows.window_s), windows)
    failed = [windows.low - 1] * len(counts)
    tried: list[tuple[Replay, list[int]]] = []
    for _ in range(windows.rounds):
        schedule = [(number * windows.window_s, wanted) for number, wanted in enumerate(counts)]
        own = replace(setup, counts={windows.kind: counts[0]})
        sizer = Schedule(windows.kind, schedule, setup.start_s)
        result = replay(arrivals, times, own, partial(_same, sizer), length_s)
        tried.append((result, counts))
        following = _next(result, times, counts, failed, windows)
        if following == counts:
            break
        counts = following
    most = max(result.share for result, _ in tried)
    best, counts = min((pair for pair in tried if pair[0].share >= GOOD * most), key=lambda pair: pair[0].gpu_s)
    return Oracle(best, counts, sum(result.cpu_s for result, _ in tried))


def _same(sizer: Sizer, clock: Callable[[], float]) -> Sizer:
    return sizer


def _first(arrivals: Sequence[Arrival], times: StepTimes, count: int, windows: Windows) -> list[int]:
    """Returns counts for the work of each window."""
    work = [0.0] * count
    for arrival in arrivals:
        work[min(count - 1, int(arrival.at / windows.window_s))] += work_s(arrival, times)
    wanted = [math.ceil(seconds / windows.window_s / FIRST_LOAD) for seconds in work]
    return [min(windows.high, max(windows.low, number)) for number in wanted]


def _next(result: Replay, times: StepTimes, counts: Sequence[int], failed: list[int], windows: Windows) -> list[int]:
    following = []
    for number, count in enumerate(counts):
        begin = number * windows.window_s
        arrived = between(result.requests, begin, begin + windows.window_s)
        hopeful = [seen for seen in arrived if alone_s(times, seen.num_prompt_tokens) <= result.limits.ttft_s]
        share = good_share(hopeful, result.limits)
        if share < GOOD:
            failed[number] = max(failed[number], count)
            following.append(min(windows.high, count + 1))
        else:
            following.append(count - (count - 1 > failed[number]))
    return following
