"""Rules that choose the number of workers by kind."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.messages import WorkerStats
from tandem.router.workers.leans import RouterDemand


class Report(NamedTuple):
    """The cluster at one moment. Attributes: stats: of the ready workers by kind."""

    now: float
    demands: Mapping[str, RouterDemand]
    ready: Mapping[str, int]
    starting: Mapping[str, int]
    leaving: Mapping[str, int]
    start_s: float
    stats: Mapping[str, Sequence[WorkerStats]]


class Sizer(ABC):
    @abstractmethod
    def targets(self, report: Report) -> Mapping[str, int]:
        """Returns the wanted number of workers by kind."""


class Fixed(Sizer):
    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts

    def targets(self, report: Report) -> Mapping[str, int]:
        return self._counts


class Schedule(Sizer):
    """Counts of one kind by moment, known beforehand. Starts begin `start_s` early.

    Args:
        counts: (moment, count) pairs in order; the first is at 0.
    """

    def __init__(self, kind: str, counts: Sequence[tuple[float, int]], start_s: float) -> None:
        self._kind = kind
        self._counts = counts
        self._start_s = start_s

    def targets(self, report: Report) -> Mapping[str, int]:
        return {self._kind: max(self._at(report.now), self._at(report.now + self._start_s))}

    def _at(self, moment: float) -> int:
        return self._counts[bisect_right(self._counts, moment, key=lambda pair: pair[0]) - 1][1]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Defaults of llm-d's workload variant autoscaler, its saturation analyzer of percentages: its documents
    `saturation-analyzer.md` and `values.yaml`.

    Attributes:
        kv_share, queue: a worker with so much is saturated.
        spare_kv, spare_queue: a worker is added if the others have less to spare on average, and leaves if the rest
            would have as much without it.
        peak_s: its values are the highest of this time.
        interval_s: time between decisions, each by one worker.
    """

    kv_share: float = 0.8
    queue: int = 5
    spare_kv: float = 0.1
    spare_queue: int = 3
    peak_s: float = 60.0
    interval_s: float = 30.0


class ThresholdRule(Sizer):
    """Adds none while one starts. With every worker saturated there is nothing to spare."""

    def __init__(self, kind: str, low: int, high: int, thresholds: Thresholds | None = None) -> None:
        self._kind, self._low, self._high = kind, low, high
        self._limits = thresholds or Thresholds()
        self._decide_at = 0.0
        self._target: int | None = None
        # Moment, and (share of KV in use, queue) by worker.
        self._samples: deque[tuple[float, list[tuple[float, int]]]] = deque()

    def targets(self, report: Report) -> Mapping[str, int]:
        limits = self._limits
        loads = [(1.0 - _free_share(stats), stats.num_queued) for stats in report.stats.get(self._kind, ())]
        self._samples.append((report.now, loads))
        while self._samples[0][0] < report.now - limits.peak_s:
            self._samples.popleft()
        count = report.ready.get(self._kind, 0) + report.starting.get(self._kind, 0)
        if self._target is None:
            self._target = count
        if report.now >= self._decide_at:
            self._decide_at = report.now + limits.interval_s
            self._target = min(self._high, max(self._low, count + self._change(report, len(loads))))
        return {self._kind: self._target}

    def _change(self, report: Report, num_ready: int) -> int:
        limits = self._limits
        peaks = [(0.0, 0)] * num_ready
        for _, loads in self._samples:
            for place, (kv, queue) in enumerate(loads[:num_ready]):
                peaks[place] = max(peaks[place][0], kv), max(peaks[place][1], queue)
        spare = [(kv, queue) for kv, queue in peaks if kv < limits.kv_share and queue < limits.queue]
        is_waiting = report.starting.get(self._kind, 0) > 0
        if not spare:
            return int(not is_waiting)
        kv, queue = sum(pair[0] for pair in spare), sum(pair[1] for pair in spare)
        if not self._is_roomy(kv, queue, len(spare)):
            return int(not is_waiting)
        return -int(len(spare) > 1 and self._is_roomy(kv, queue, len(spare) - 1))

    def _is_roomy(self, kv: float, queue: int, num_workers: int) -> bool:
        limits = self._limits
        spare_kv, spare_queue = limits.kv_share - kv / num_workers, limits.queue - queue / num_workers
        return spare_kv >= limits.spare_kv and spare_queue >= limits.spare_queue


def _free_share(stats: WorkerStats) -> float:
    """Share of pages that no running request holds."""
    total = max(1, stats.num_total_pages)
    return (total - stats.num_locked_pages) / total
