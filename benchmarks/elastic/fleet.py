"""A cluster in virtual time: real routers and planners over simulated workers that start, drain and die."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from benchmarks.elastic.attempts import Port
from benchmarks.elastic.clients import Clients
from benchmarks.elastic.events import Call, Events
from benchmarks.elastic.outcome import Limits
from benchmarks.elastic.pages import PAGE_SIZE
from benchmarks.elastic.sizers import Report, Sizer
from benchmarks.elastic.step_times import StepTimes
from benchmarks.elastic.worker import SimWorker
from tandem.deploy.supervise.role_planner import RolePlanner
from tandem.messages import PROTOCOL_VERSION, Hello, LinkState, PageFormat, RouterMessage, WorkerStats
from tandem.router.config import RouterConfig
from tandem.router.policies.least_cost import LeastCost
from tandem.router.policies.least_loaded import LeastLoaded
from tandem.router.router import Router
from tandem.router.workers.leans import RouterDemand
from tandem.router.workers.objectives import Objectives

ROLES = {"any": "both", "both": "both", "prefill": "prefill", "decode": "decode"}
SizerMaker = Callable[[Callable[[], float]], Sizer]
# Longer than real ones, to save time; both are within the routers' patience.
BEAT_S = 1.0
WATCH_S = 1.0
LOOK_S = 5.0
# Interval between exchanges of loads between routers, as router/peer_exchange.py has it.
PEERS_S = 0.1
# From a death to the start of a replacement.
NOTICE_S = 1.0


@dataclass(frozen=True, slots=True)
class Setup:
    """
    Attributes:
        counts: workers at the beginning by kind, all ready.
        start_s: time of a worker's start.
        deaths_per_hour: share of the workers that dies within an hour.
        turn_s: interval between the supervisor's turns.
        shares_prefixes: prompts have common prefixes, so workers report theirs.
    """

    counts: Mapping[str, int]
    limits: Limits
    start_s: float = 40.0
    num_routers: int = 1
    deaths_per_hour: float = 0.0
    shares_prefixes: bool = False
    drain_timeout_s: float = 600.0
    turn_s: float = 0.5
    seed: int = 0


@dataclass(eq=False, slots=True)
class Life:
    """One process of a worker. Attributes: began: of its start."""

    name: str
    kind: str
    began: float
    state: Literal["starting", "ready", "leaving"] = "starting"
    sim: SimWorker | None = None
    start: Call | None = None
    leave_by: float = 0.0
    num_restarts: int = 0


@dataclass(slots=True)
class Usage:
    """
    Attributes:
        ended_s: time of all workers that have ended, from the beginning of their starts.
        changes: (moment, kind, change of the target).
        counts: (moment, ready, starting and ready).
    """

    ended_s: float = 0.0
    num_deaths: int = 0
    changes: list[tuple[float, str, int]] = field(default_factory=list)
    counts: list[tuple[float, int, int]] = field(default_factory=list)


class Fleet:
    def __init__(self, events: Events, times: StepTimes, setup: Setup, make_sizer: SizerMaker) -> None:
        limits = setup.limits
        config = RouterConfig(
            "nowhere",
            "model",
            10**7,
            max_queued_requests=10**9,
            max_waiting_bytes=2**50,
            worker_wait_timeout_s=3600.0,
            ttft_objective_ms=1e3 * limits.ttft_s,
            itl_objective_ms=1e3 * limits.itl_s,
        )
        clock = events.clock
        self.events = events
        self.usage = Usage()
        # As `tandem serve` has it by default.
        self._plans_roles = "any" in setup.counts
        self.routers = []
        for number in range(setup.num_routers):
            policy = LeastCost(setup.seed + number, clock) if self._plans_roles else LeastLoaded(setup.seed + number)
            self.routers.append(Router(replace(config, router_id=f"router-{number}"), policy, clock))
        self.clients = Clients(events, self.routers)
        self._times = times
        self._setup = setup
        self._sizer = make_sizer(clock)
        self._random = random.Random(f"{setup.seed}/fleet")
        self._roles = RolePlanner(Objectives(limits.ttft_s, limits.itl_s), clock)
        self._lives: dict[str, Life] = {}
        self._targets: dict[str, int] = {}
        for kind, count in setup.counts.items():
            for _ in range(count):
                self._join(self._new_life(kind))
        self._plan()
        events.every(BEAT_S, self._beat)
        events.every(WATCH_S, self._watch, first=WATCH_S)
        events.every(LOOK_S, self.clients.look_at_all, first=LOOK_S)
        events.every(setup.turn_s, self._take_turn, first=setup.turn_s)
        if setup.num_routers > 1:
            events.every(PEERS_S, self._exchange_loads, first=PEERS_S)
        if setup.deaths_per_hour:
            self._plan_death()

    def count(self, kind: str | None, *states: str) -> int:
        return sum(kind in (None, life.kind) and life.state in states for life in self._lives.values())

    @property
    def lives(self) -> list[Life]:
        return list(self._lives.values())

    def close(self) -> None:
        for router in self.routers:
            router.shut_down()
        self.clients.look_at_all()

    def kill(self, name: str) -> None:
        """Ends a worker at once, and starts another in its place."""
        life = self._lives[name]
        assert life.sim is not None
        self.usage.num_deaths += 1
        self._end(life, "died")
        if life.state == "ready":
            self.events.after(NOTICE_S, lambda: self._restart(life))

    # --- starts ---

    def _new_life(self, kind: str) -> Life:
        number = next(n for n in range(len(self._lives) + 1) if f"{kind}-{n}" not in self._lives)
        life = Life(f"{kind}-{number}", kind, self.events.now)
        self._lives[life.name] = life
        return life

    def _start(self, life: Life) -> None:
        life.start = self.events.after(self._setup.start_s, lambda: self._join(life))

    def _restart(self, dead: Life) -> None:
        if self._lives.get(dead.name) is None and self.count(dead.kind, "ready", "starting") < self._targets[dead.kind]:
            life = Life(dead.name, dead.kind, self.events.now, num_restarts=dead.num_restarts + 1)
            self._lives[life.name] = life
            self._start(life)

    def _join(self, life: Life) -> None:
        life.state = "ready"
        role, setup = ROLES[life.kind], self._setup
        sim = life.sim = SimWorker(
            life.name,
            role,
            self.events,
            self._times,
            self.clients,
            self._sim,
            itl_s=setup.limits.itl_s,
            reports_prefixes=setup.shares_prefixes,
        )
        incarnation = f"{life.name}.{life.num_restarts}.{life.began:.3f}"
        page_format = PageFormat("model", 2**26, "model")
        hello = Hello(
            PROTOCOL_VERSION,
            life.name,
            incarnation,
            role,
            "cuda",
            "nowhere:1",
            1,
            page_format,
            self._times.pool_tokens // PAGE_SIZE,
            PAGE_SIZE,
            num_restarts=life.num_restarts,
            has_links=life.kind == "any",
            max_batch_size=self._times.max_batch_size,
            start_s=setup.start_s,
        )
        self._plan()
        others = [other.sim for other in self._lives.values() if other.sim is not None and other is not life]
        for number, router in enumerate(self.routers):
            port = Port(router)
            sim.reports.ports.append(port)
            port.worker = router.connect_worker(hello, _sender(sim, port), lambda _: None)
            for other in others:
                if sim.sends and other.receives and (worker := other.reports.ports[number].worker) is not None:
                    port.send(LinkState(other.worker_id, worker.incarnation, up=True))
                if other.sends and sim.receives:
                    other.reports.ports[number].send(LinkState(sim.worker_id, incarnation, up=True))
        sim.beat()

    def _sim(self, worker_id: str) -> SimWorker | None:
        life = self._lives.get(worker_id)
        return life.sim if life is not None else None

    # --- ends ---

    def _end(self, life: Life, reason: str) -> None:
        self.usage.ended_s += self.events.now - life.began
        del self._lives[life.name]
        if (sim := life.sim) is not None:
            sim.die()
            for port in sim.reports.ports:
                if port.worker is not None:
                    port.router.lose_worker(port.worker, "stream_ended", reason)
            sim.tell_receivers()

    def _plan_death(self) -> None:
        rate = self._setup.deaths_per_hour * max(1, self.count(None, "ready")) / 3600.0

        def die() -> None:
            ready = [life.name for life in self._lives.values() if life.state == "ready"]
            if ready:
                self.kill(self._random.choice(ready))
            self._plan_death()

        self.events.after(self._random.expovariate(rate), die)

    # --- turns ---

    def _beat(self) -> None:
        for life in list(self._lives.values()):
            if life.sim is not None:
                life.sim.beat()

    def _watch(self) -> None:
        for router in self.routers:
            router.check_deadlines()

    def _exchange_loads(self) -> None:
        counts = {number: router.counts() for number, router in enumerate(self.routers)}
        for number, router in enumerate(self.routers):
            for other, theirs in counts.items():
                if other != number:
                    router.elsewhere.record(f"router-{other}", theirs)
            router.update_loads()

    def _plan(self) -> dict[str, int]:
        """Tells the routers the planned workers. Returns the requests left on each leaving one."""
        planned = {life.name: ROLES[life.kind] for life in self._lives.values() if life.state != "leaving"}
        left: Counter[str] = Counter()
        for router in self.routers:
            left.update(router.set_workers(planned))
        return left

    def _take_turn(self) -> None:
        """As the supervisor twice a second: leans, drained workers, and the sizer's targets."""
        demands = {}
        for number, router in enumerate(self.routers):
            demands[f"router-{number}"] = router.exchange_leans(self._roles.leans)
        if self._plans_roles:
            self._roles.plan(demands)
        if self.count(None, "leaving"):
            left = self._plan()
            for life in [life for life in self._lives.values() if life.state == "leaving"]:
                if not left[life.name] or self.events.now > life.leave_by:
                    self._end(life, "left")
        targets = self._sizer.targets(self._report(demands))
        for kind, target in targets.items():
            have = self.count(kind, "ready", "starting")
            if self._targets.get(kind, have) != target:
                self.usage.changes.append((self.events.now, kind, target - self._targets.get(kind, have)))
            self._targets[kind] = target
            self._grow(kind, target - have)
            self._shrink(kind, have - target)
        now_there = self.count(None, "ready"), self.count(None, "ready", "starting")
        if not self.usage.counts or self.usage.counts[-1][1:] != now_there:
            self.usage.counts.append((self.events.now, *now_there))

    def _report(self, demands: Mapping[str, RouterDemand]) -> Report:
        kinds = {**self._setup.counts, **self._targets}
        by_state = {
            state: {kind: self.count(kind, state) for kind in kinds} for state in ("ready", "starting", "leaving")
        }
        stats: dict[str, list[WorkerStats]] = {kind: [] for kind in kinds}
        for life in self._lives.values():
            if life.state == "ready" and life.sim is not None:
                stats[life.kind].append(life.sim.reports.last_stats)
        return Report(self.events.now, demands, **by_state, start_s=self._setup.start_s, stats=stats)

    def _grow(self, kind: str, number: int) -> None:
        """Takes draining workers back first."""
        draining = [life for life in self._lives.values() if life.kind == kind and life.state == "leaving"]
        for _ in range(number):
            if draining:
                draining.pop(0).state = "ready"
                self._plan()
            else:
                self._start(self._new_life(kind))

    def _shrink(self, kind: str, number: int) -> None:
        """Ends starts first."""
        if number <= 0:
            return
        lives = [life for life in self._lives.values() if life.kind == kind]
        starting = [life for life in reversed(lives) if life.state == "starting"]
        ready = [life for life in reversed(lives) if life.state == "ready"]
        for life in [*starting, *ready][:number]:
            if life.state == "starting":
                assert life.start is not None
                life.start.is_off = True
                self._end(life, "not needed")
            else:
                life.state = "leaving"
                life.leave_by = self.events.now + self._setup.drain_timeout_s
        self._plan()


def _sender(sim: SimWorker, port: Port) -> Callable[[Sequence[RouterMessage]], None]:
    return lambda messages: sim.receive(port, messages)
