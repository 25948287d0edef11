"""Plans how many workers and routers a cluster has, between bounds.

A pure function of reports and their history: no I/O, no threads, an injected clock.

Need: the fewest workers with which the objectives hold (deploy/supervise/worker_needs.py). Load is the rate of
arrivals, not the requests in service: these are few while steps are short. Waiting requests that cannot start within
the TTFT objective are added to the load, less those that the ready workers serve before a new one can be ready. If
workers with a queue serve fewer requests than computed, the load counts as many times more.

Growth: at once, to the need expected when a worker ordered now is ready. A trend counts as far ahead as it has been
seen, and a rate less its standard error. A starting worker is no capacity, but it is not ordered again.

Shrinking: hysteresis has four parts.

- The load is taken SLACK times, with its standard error. The remaining workers must serve all of it: of N workers each
  gets N / (N - 1) of its load.
- They must have done so for `hold_s`: at least HOLD_S and twice the measured start.
- One change at a time, of at most half of the workers, SETTLE_S after another. No change while workers start or leave,
  or while a router does not report.
- A growth soon after a shrink at about the same rate doubles `hold_s`, up to MAX_HOLD_S. It halves after EASED_S
  without one.

With a lower bound of 0, a kind goes to 0 after IDLE_S without a request, and from there at once to the need of the
waiting requests. Forward times of a worker's first seconds do not count (router/workers/worker_registry.py). Routers
are sized by the CPU time of their event loops.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tandem.deploy.config.bounds import Bounds
from tandem.deploy.supervise.arrival_history import Rate
from tandem.deploy.supervise.measured_load import MeasuredLoad
from tandem.deploy.supervise.worker_needs import WorkerNeeds, layout_of
from tandem.forward_times import START_TIMES
from tandem.messages import ForwardTimes
from tandem.router.worker_wait import UNKNOWN_START_S
from tandem.router.workers.leans import RouterDemand
from tandem.router.workers.objectives import Objectives

ROUTER = "router"
IDLE_S = 300.0
HOLD_S = 60.0
MAX_HOLD_S = 1800.0
EASED_S = 3600.0
# Ratio of rates up to which a growth after a shrink undoes a mistake, and does not follow the load.
SAME_RATE = 1.25
SETTLE_S = 20.0
SLACK = 1.1
# Multiple of a start after which it keeps no other from leaving.
OVERDUE = 3.0
# Least time to clear a queue in, in seconds.
CLEAR_S = 10.0
# A router's event loop queues beyond this share of a core.
BUSY = 0.6
# Seconds of a queue after which its service is compared with the computed one, and the largest ratio of both.
WATCHED_S = 15.0
MAX_ERROR = 4.0


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

    def longest_start_s(self, kinds: Mapping[str, Bounds]) -> float:
        return max((self.start_s.get(kind) or UNKNOWN_START_S for kind in kinds if kind != ROUTER), default=0.0)


@dataclass(frozen=True, slots=True)
class _Watched:
    """A queue, since it began or the ready workers last changed."""

    at: float
    num_served: int
    ready: Mapping[str, int]


class SizePlanner:
    """
    Attributes:
        bounds: by kind, fixed kinds included. May be replaced between plans.
        targets: planned numbers by kind.
        reasons: cause of each kind's last change: load, trend, queue or idle.
    """

    def __init__(
        self,
        bounds: Mapping[str, Bounds],
        objectives: Objectives,
        clock: Callable[[], float],
        assumed: ForwardTimes = START_TIMES["cuda"],
    ) -> None:
        """Args: assumed: forward times before any worker has joined."""
        self.bounds = dict(bounds)
        self.targets: dict[str, int] = {}
        self.reasons: dict[str, str] = {}
        self._objectives = objectives
        self._clock = clock
        self._load = MeasuredLoad(clock(), assumed)
        self._watched: _Watched | None = None
        self._error = 1.0
        self._hold_s = HOLD_S
        self._eased_at = self._grown_at = clock()
        self._shrunk_at, self._shrunk_rate = -math.inf, 0.0
        self._starting_since: dict[str, float] = {}
        # Needs of lasting load, by time.
        self._needs: deque[tuple[float, dict[str, int]]] = deque()

    def plan(self, report: SizeReport) -> Mapping[str, int]:
        """Returns the planned number of each kind."""
        now = self._clock()
        self.targets = {
            kind: bounds.clamp(self.targets.get(kind, report.ready.get(kind, 0) + report.starting.get(kind, 0)))
            for kind, bounds in self.bounds.items()
        }
        self._starting_since = {
            kind: self._starting_since.get(kind, now) for kind, count in report.starting.items() if count
        }
        self._load.learn(report.demands, now)
        rate = self._load.rate
        workers = WorkerNeeds(self._load.times, self._objectives, self._load.request)
        served = workers.served(layout_of(report.ready)) / self._error
        # Requests that cannot start within the objective.
        excess = max(0.0, self._load.num_waiting - served * self._objectives.ttft_s)
        self._compare(report, served, rate, excess, now)
        needs = self._grow(report, workers, served, rate, excess, now)
        lasting = self._need_at(workers, rate, SLACK * max(rate.now, rate.after(HOLD_S)) + rate.deviation, now)
        self._shrink(report, {kind: max(need, needs[kind]) for kind, need in lasting.items()}, rate, now)
        return dict(self.targets)

    # --- needs ---

    def _compare(self, report: SizeReport, served: float, rate: Rate, excess: float, now: float) -> None:
        """Corrects the computed capacity by the requests that ready workers take from a queue.

        Args:
            served: requests per second that they should take.
        """
        num_served = self._load.arrivals - self._load.num_waiting
        if not excess and self._error > 1:
            # They serve this rate.
            self._error = max(1.0, min(self._error, self._error * served / rate.now if rate.now > 0 else 1.0))
        if not excess or not served or self._load.oldest_wait_s < self._objectives.ttft_s:
            self._watched = None
        elif self._watched is None or self._watched.ready != report.ready:
            self._watched = _Watched(now, num_served, dict(report.ready))
        elif now - self._watched.at >= WATCHED_S:
            measured = max(0, num_served - self._watched.num_served) / (now - self._watched.at)
            error = self._error * served / measured if measured else MAX_ERROR
            self._error = min(MAX_ERROR, max(self._error, error))
            self._watched = _Watched(now, num_served, dict(report.ready))

    def _need_at(self, workers: WorkerNeeds, rate: Rate, arrivals: float, now: float) -> dict[str, int]:
        bounds = {kind: bounds for kind, bounds in self.bounds.items() if kind != ROUTER}
        if now - self._load.busy_at >= IDLE_S:
            needs = dict.fromkeys(bounds, 0)
        else:
            needs = workers.fewest(self._error * arrivals, bounds)
        if ROUTER in self.bounds:
            more = arrivals / rate.now if rate.now > 0 else 1.0
            needs[ROUTER] = max(1, math.ceil(self._load.cpu * more / BUSY))
        return needs

    # --- changes ---

    def _grow(
        self, report: SizeReport, workers: WorkerNeeds, served: float, rate: Rate, excess: float, now: float
    ) -> dict[str, int]:
        """Returns the needs. Args: served: requests per second that the ready workers take from a queue."""
        start_s = report.longest_start_s(self.bounds)
        expected = max(0.0, max(rate.now, rate.after(start_s)) - rate.deviation)
        queued = 0.0
        if excess:
            # A queue confirms recent arrivals, however few.
            left = excess + (max(expected, rate.recent) - served) * start_s
            queued = max(0.0, left) / max(CLEAR_S, start_s)
        needs = self._need_at(workers, rate, expected + queued, now)
        for kind, bounds in self.bounds.items():
            have = self.targets[kind]
            if (need := bounds.clamp(needs[kind])) <= have:
                continue
            self.targets[kind] = need
            self.reasons[kind] = self._reason(kind, have, workers, rate, expected, now)
            self._grown_at = now
            if now - self._shrunk_at < 2 * self._hold_s and rate.now <= SAME_RATE * self._shrunk_rate:
                self._hold_s = min(MAX_HOLD_S, 2 * self._hold_s)
                self._shrunk_at = -math.inf
                self._eased_at = now
        return needs

    def _reason(self, kind: str, have: int, workers: WorkerNeeds, rate: Rate, expected: float, now: float) -> str:
        if self._need_at(workers, rate, min(rate.now, expected), now)[kind] > have > 0:
            return "load"
        return "trend" if self._need_at(workers, rate, expected, now)[kind] > have > 0 else "queue"

    def _shrink(self, report: SizeReport, needs: dict[str, int], rate: Rate, now: float) -> None:
        if now - self._eased_at >= EASED_S:
            self._hold_s, self._eased_at = max(HOLD_S, self._hold_s / 2), now
        is_heard = bool(report.demands) and len(report.demands) >= report.ready.get(ROUTER, 0)
        self._needs.append((now, needs if is_heard else dict(self.targets)))
        hold_s = max(self._hold_s, 2 * report.longest_start_s(self.bounds))
        while now - self._needs[0][0] > hold_s:
            self._needs.popleft()
        if not is_heard or now - self._grown_at < hold_s or now - self._shrunk_at < SETTLE_S:
            return
        if any(report.leaving.values()) or any(self._is_starting(report, kind, now) for kind in self.bounds):
            return
        for kind, bounds in self.bounds.items():
            have = self.targets[kind]
            need = bounds.clamp(max(needs.get(kind, have) for _, needs in self._needs))
            if need < have:
                self.targets[kind] = max(need, -(-have // 2)) if need else 0
                self.reasons[kind] = "load" if need else "idle"
                self._shrunk_at, self._shrunk_rate = now, rate.now
                return

    def _is_starting(self, report: SizeReport, kind: str, now: float) -> bool:
        """Returns whether processes of a kind start, and are not overdue: one that cannot start must not block."""
        since = self._starting_since.get(kind)
        return since is not None and now - since < OVERDUE * (report.start_s.get(kind) or UNKNOWN_START_S)
