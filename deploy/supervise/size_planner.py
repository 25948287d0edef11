"""Plans how many workers and routers a cluster has, between bounds.

A pure function of reports and their history: no I/O, no threads, an injected clock.

Need: the fewest workers with which the objectives hold, by the capacities of deploy/supervise/capacities.py. Load is
the rate of arrivals, not the requests in service: these are few while steps are short. Work that waits longer than
the TTFT objective is added to the load, less what the ready workers serve of it before a new one could be ready.

Growth: at once, to the need expected when a worker ordered now is ready. A trend counts as far ahead as it has been
seen. A starting worker is no capacity, but it is not ordered again.

Shrinking: hysteresis has four parts.

- The load is taken SLACK times, and the remaining workers must serve all of it.
- This must have been so for `hold_s`: at least HOLD_S and twice the measured start.
- One change at a time, of at most half of the workers, SETTLE_S after another: none while workers start or leave.
- A growth that undoes a shrink doubles `hold_s`, up to MAX_HOLD_S; it halves again after a day's quarter without one.

With a lower bound of 0, a kind goes to 0 after IDLE_S without a request, and from there at once to the need of the
waiting requests. Forward times of a worker's first seconds do not count (router/workers/worker_registry.py). Routers
are sized by the CPU time of their event loops.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tandem.deploy.supervise.arrival_history import ArrivalHistory, Rate
from tandem.deploy.supervise.worker_needs import Bounds, MeanRequest, WorkerNeeds, layout_of
from tandem.messages import ForwardTimes
from tandem.router.workers.leans import RouterDemand
from tandem.router.workers.objectives import Objectives

__all__ = ["Bounds", "SizePlanner", "SizeReport"]

IDLE_S = 300.0
HOLD_S = 60.0
MAX_HOLD_S = 1800.0
SETTLE_S = 20.0
SLACK = 1.1
# Seconds of a start before one was measured.
UNKNOWN_START_S = 60.0
# A router's event loop queues beyond this share of a core.
BUSY = 0.6
# Number of recent requests whose mean counts.
MEMORY = 500.0
CPU_MEMORY_S = 30.0
NOTHING = MeanRequest(*[0.0] * 6)


@dataclass(frozen=True, slots=True)
class SizeReport:
    """The cluster at one moment. Mappings are by kind, and a missing kind has none.

    Attributes:
        demands: by router, of routers that have answered lately.
        ready, starting, leaving: numbers of processes. A dead one that is started again is starting.
        start_s: measured seconds from an order to readiness.
    """

    demands: Mapping[str, RouterDemand]
    ready: Mapping[str, int]
    starting: Mapping[str, int] = field(default_factory=dict)
    leaving: Mapping[str, int] = field(default_factory=dict)
    start_s: Mapping[str, float] = field(default_factory=dict)


class _Means:
    """Means per request over about MEMORY requests."""

    def __init__(self, size: int) -> None:
        self._count = 0.0
        self._sums = [0.0] * size

    def add(self, count: float, sums: tuple[float, ...]) -> None:
        kept = math.exp(-count / MEMORY)
        self._count = kept * self._count + count
        self._sums = [kept * old + new for old, new in zip(self._sums, sums, strict=True)]

    @property
    def values(self) -> list[float]:
        return [total / self._count if self._count else 0.0 for total in self._sums]

    @property
    def is_known(self) -> bool:
        return self._count > 0


class SizePlanner:
    """
    Attributes:
        targets: planned numbers by kind.
        reasons: cause of the last change of each kind, in one word.
    """

    def __init__(self, bounds: Mapping[str, Bounds], objectives: Objectives, clock: Callable[[], float]) -> None:
        self.targets: dict[str, int] = {}
        self.reasons: dict[str, str] = {}
        self.bounds = dict(bounds)
        self._objectives = objectives
        self._clock = clock
        self._history = ArrivalHistory()
        self._prompts = _Means(4)
        self._outputs = _Means(1)
        self._context = 0.0
        self._times = ForwardTimes()
        self._pool_tokens = self._max_decoding = math.inf
        self._workers = WorkerNeeds(self._times, objectives, NOTHING)
        self._seen: dict[str, RouterDemand] | None = None
        self._planned_at = clock()
        # A cluster may begin with no worker.
        self._busy_at = -math.inf
        self._cpu = 0.0
        self._hold_s = HOLD_S
        self._grown_at = clock()
        self._shrunk_at = -math.inf
        self._needs: deque[tuple[float, dict[str, int]]] = deque()

    def plan(self, report: SizeReport) -> Mapping[str, int]:
        """Returns the planned number of each bounded kind."""
        now = self._clock()
        self.targets = {
            kind: _within(bounds, self.targets.get(kind, report.ready.get(kind, 0) + report.starting.get(kind, 0)))
            for kind, bounds in self.bounds.items()
        }
        self._learn(report, now)
        rate = self._history.rate()
        needs, lasting = self._needed(report, rate), self._lasting(report, rate)
        self._grow(needs, now)
        self._shrink(report, lasting, now)
        return dict(self.targets)

    # --- measurements ---

    def _learn(self, report: SizeReport, now: float) -> None:
        elapsed_s, self._planned_at = now - self._planned_at, now
        demands = report.demands
        arrivals, cpu_s = 0.0, 0.0
        prompts: list[float] = [0.0] * 5
        outputs = [0.0, 0.0]
        for name, router in demands.items():
            before = self._seen.get(name) if self._seen is not None else router
            if before is None or router.arrivals < before.arrivals or router.cpu_s < before.cpu_s:
                before = RouterDemand()
            arrivals += router.arrivals - before.arrivals
            cpu_s += router.cpu_s - before.cpu_s
            outputs[0] += max(0, router.finished - before.finished)
            outputs[1] += max(0, router.finished_tokens - before.finished_tokens)
            prompts = [
                total + max(0, count - was)
                for total, count, was in zip(prompts, _counts(router), _counts(before), strict=True)
            ]
        self._seen = {**(self._seen or {}), **demands}
        if elapsed_s > 0 and demands:
            self._history.add(arrivals, elapsed_s)
            news = 1.0 - math.exp(-elapsed_s / CPU_MEMORY_S)
            self._cpu += news * (cpu_s / elapsed_s - self._cpu)
        if prompts[0]:
            self._prompts.add(prompts[0], tuple(prompts[1:]))
        if not self._outputs.is_known and (known := [r.output_tokens for r in demands.values() if r.output_tokens]):
            self._outputs.add(8.0, (8.0 * sum(known) / len(known),))
        if outputs[0]:
            self._outputs.add(outputs[0], (outputs[1],))
        decoding = sum(sum(router.num_decoding.values()) for router in demands.values())
        if decoding:
            self._context = sum(router.num_kv_tokens for router in demands.values()) / decoding
        if arrivals or decoding or any(router.num_waiting or router.num_unplaced for router in demands.values()):
            self._busy_at = now
        measured = [router for router in demands.values() if router.is_measured]
        if not measured and self._times == ForwardTimes():
            measured = [router for router in demands.values() if router.times.step_s > 0]
        if measured:
            self._times = measured[0].times
            self._pool_tokens = min((r.pool_tokens for r in measured if r.pool_tokens), default=math.inf)
            self._max_decoding = min((r.max_decoding for r in measured if r.max_decoding), default=math.inf)
        tokens, attended, elsewhere, elsewhere_attended = self._prompts.values
        request = MeanRequest(
            tokens,
            attended,
            elsewhere,
            elsewhere_attended,
            self._context,
            self._outputs.values[0],
            self._pool_tokens,
            self._max_decoding,
        )
        self._workers = WorkerNeeds(self._times, self._objectives, request)

    # --- needs ---

    def _needed(self, report: SizeReport, rate: Rate) -> dict[str, int]:
        start_s = max((self._start_s(report, kind) for kind in self.bounds if kind != "router"), default=0.0)
        expected = max(rate.now, rate.after(start_s))
        return self._need_at(expected + self._backlog_rate(report, rate, start_s), rate)

    def _lasting(self, report: SizeReport, rate: Rate) -> dict[str, int]:
        return self._need_at(SLACK * max(rate.now, rate.after(HOLD_S)) + self._backlog_rate(report, rate, 0.0), rate)

    def _need_at(self, arrivals: float, rate: Rate) -> dict[str, int]:
        needs = {}
        if "router" in self.bounds:
            share = arrivals / rate.now if rate.now > 0 else 1.0
            needs["router"] = max(1, math.ceil(self._cpu * share / BUSY))
        workers = {kind: bounds for kind, bounds in self.bounds.items() if kind != "router"}
        if self._clock() - self._busy_at >= IDLE_S:
            return needs | dict.fromkeys(workers, 0)
        return needs | self._workers.fewest(arrivals, workers)

    def _backlog_rate(self, report: SizeReport, rate: Rate, start_s: float) -> float:
        """Returns what waiting requests add to the rate."""
        waiting = sum(router.num_waiting for router in report.demands.values())
        oldest_s = max((router.oldest_wait_s for router in report.demands.values()), default=0.0)
        ttft_s = self._objectives.ttft_s
        expected = rate.now * ttft_s
        excess = waiting - expected - 3 * math.sqrt(expected)
        if oldest_s < ttft_s or excess <= 0:
            return 0.0
        served = self._workers.served(layout_of(report.ready)) - rate.now
        left = excess - served * start_s
        return max(0.0, left) / max(10.0, start_s)

    @staticmethod
    def _start_s(report: SizeReport, kind: str) -> float:
        return report.start_s.get(kind) or UNKNOWN_START_S

    # --- changes ---

    def _grow(self, needs: Mapping[str, int], now: float) -> None:
        for kind, bounds in self.bounds.items():
            need = _within(bounds, needs.get(kind, 0))
            if need > self.targets[kind]:
                if now - self._shrunk_at < 2 * self._hold_s:
                    self._hold_s = min(MAX_HOLD_S, 2 * self._hold_s)
                    self._shrunk_at = -math.inf
                self.targets[kind] = need
                self.reasons[kind] = "load"
                self._grown_at = now

    def _shrink(self, report: SizeReport, lasting: dict[str, int], now: float) -> None:
        hold_s = max([self._hold_s, *(2 * self._start_s(report, kind) for kind in report.start_s)])
        self._needs.append((now, lasting))
        while self._needs and now - self._needs[0][0] > hold_s:
            self._needs.popleft()
        heard_all = len(report.demands) >= report.ready.get("router", 0)
        if not heard_all or now - self._grown_at < hold_s or now - self._shrunk_at < SETTLE_S:
            return
        for kind, bounds in self.bounds.items():
            have = self.targets[kind]
            if report.leaving.get(kind) or report.starting.get(kind):
                continue
            need = _within(bounds, max(needs.get(kind, 0) for _, needs in self._needs))
            if need < have:
                self.targets[kind] = need if not need else max(need, have - max(1, have // 2))
                self.reasons[kind] = "idle" if not need else "load"
                self._shrunk_at = now
                return


def _within(bounds: Bounds, count: int) -> int:
    return max(bounds.low, min(bounds.high, count))


def _counts(router: RouterDemand) -> tuple[int, ...]:
    return (
        router.prompts,
        router.prompt_tokens,
        router.attended_tokens,
        router.elsewhere_tokens,
        router.elsewhere_attended,
    )
