"""Keeps the number of processes of each kind at the planner's target, within the bounds.

Each process joins or leaves in a change of its own, side by side with others, in turns that never wait. A process that
drains is taken back if the target rises again, and one that still starts ends at once if the target falls.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.config import WORKER_KINDS, WorkerKind
from tandem.deploy.config.bounds import SIZED_KINDS, Bounds, SizedKind
from tandem.deploy.errors import ClusterError
from tandem.deploy.supervise.change import Change
from tandem.deploy.supervise.size_planner import SizePlanner, SizeReport
from tandem.router.worker_wait import UNKNOWN_START_S
from tandem.router.workers.leans import RouterDemand
from tandem.router.workers.sizes import ClusterSize, KindSize

logger = logging.getLogger(__name__)

PLAN_INTERVAL_S = 0.5
# Interval between looks for room while there is none.
ROOM_INTERVAL_S = 5.0
# Delay of the next start after one failed start, and after several in a row.
RETRY_S = 5.0
LATER_RETRY_S = 60.0
# Failed starts in a row after which requests no longer wait.
NUM_FAILURES = 2
# Reason of a change for which the planner has none: a kind of a fixed number lost workers with their node.
REPLACED = "replaced"
NOUNS: Mapping[SizedKind, str] = {
    "any": "workers",
    "prefill": "prefill workers",
    "decode": "decode workers",
    "both": "workers of role both",
    "router": "routers",
}


class Sized(Protocol):
    """The cluster, for one thread."""

    @property
    def bounds(self) -> Mapping[SizedKind, Bounds]: ...

    @property
    def start_s(self) -> dict[SizedKind, float]:
        """Seconds from the order of a process to its readiness, as last measured."""

    @property
    def has_spare_routers(self) -> bool:
        """Whether there are addresses of routers that are not to run."""

    def names(self, kind: SizedKind) -> list[str]:
        """Returns the planned processes, those that drain included."""

    def has_joined(self, name: str) -> bool: ...

    def is_evacuated(self, name: str) -> bool:
        """Returns whether a process leaves because its node is announced to go."""

    def join(self, kind: SizedKind, names: Sequence[str], begun: Sequence[SizedKind]) -> dict[str, Change]:
        """Returns the changes that add these processes. Args: begun: kinds of others that begin at this moment.

        Raises ValueError or ClusterError: there is no room for all of them.
        """

    def leave(self, name: str, on_drained: Callable[[], None]) -> Change:
        """Returns the change that drains and ends a process."""

    def end(self, name: str) -> Change:
        """Returns the change that ends a process which has not joined."""

    def keep(self, name: str) -> None:
        """Lets a draining process take requests again."""


@dataclass(slots=True)
class _Going:
    """A change of one process. Attributes: can_stay: it drains, and can still be taken back."""

    kind: SizedKind
    change: Change
    is_start: bool
    began: float
    can_stay: bool = False


@dataclass(slots=True)
class _Starts:
    """Recent starts of a kind. Attributes: num_failed: failed ones in a row; no_room: why none can begin."""

    num_failed: int = 0
    failure: str = ""
    not_before: float = 0.0
    no_room: str = ""


class Sizing:
    def __init__(self, cluster: Sized, planner: SizePlanner, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._planner = planner
        self._clock = clock
        self._plan_at = clock()
        self._going: dict[str, _Going] = {}
        self._starts: dict[SizedKind, _Starts] = {kind: _Starts() for kind in SIZED_KINDS}
        self._targets: dict[SizedKind, int] = {}
        self._reasons: dict[SizedKind, str] = {}
        self._num_changes: Counter[tuple[str, str, str]] = Counter()

    @property
    def is_changing(self) -> bool:
        return any(not going.change.is_waiting for going in self._going.values())

    def withdraw(self) -> None:
        """Ends the starts that wait for a node."""
        for name in [name for name, going in self._going.items() if going.change.is_waiting]:
            self._going.pop(name).change.withdraw("another change was requested")

    def changes(self, name: str) -> bool:
        return name in self._going

    def take_turn(self, demands: Mapping[str, RouterDemand], held: Collection[str] | None) -> None:
        """Continues changes, and begins those that the planner wants.

        Args:
            demands: recent ones, by router.
            held: processes that must not leave now; None: begin nothing.
        """
        self._continue()
        now = self._clock()
        if now < self._plan_at or not self._cluster.bounds:
            return
        self._plan_at = now + PLAN_INTERVAL_S
        counts = {kind: self._counts(kind) for kind in SIZED_KINDS}
        self._planner.bounds = self._bounds(counts)
        wanted = self._planner.plan(
            SizeReport(
                demands,
                ready={kind: ready for kind, (ready, _, _) in counts.items()},
                starting={kind: starting for kind, (_, starting, _) in counts.items()},
                leaving={kind: leaving for kind, (_, _, leaving) in counts.items()},
                start_s={kind: self._start_s(kind) for kind in self._cluster.bounds},
            )
        )
        begun: list[SizedKind] = []
        for kind, bounds in self._cluster.bounds.items():
            ready, starting, _ = counts[kind]
            target = self._targets[kind] = bounds.clamp(wanted.get(kind, ready + starting))
            if held is not None:
                begun += self._grow(kind, target - ready - starting, begun)
                self._shrink(kind, ready + starting - target, held)
        self._continue()

    def size(self) -> ClusterSize | None:
        """Returns the state for the routers; None: the numbers are as configured."""
        if not self._cluster.bounds and not self._cluster.has_spare_routers:
            return None
        kinds: dict[str, KindSize] = {}
        for kind, bounds in self._cluster.bounds.items():
            ready, starting, leaving = self._counts(kind)
            kinds[kind] = KindSize(
                bounds.low,
                bounds.high,
                self._targets.get(kind, ready + starting),
                ready,
                starting,
                leaving,
                self._start_s(kind),
                self._reasons.get(kind, ""),
                self._starts[kind].no_room,
            )
        routers = (name for name in self._cluster.names("router") if not self._is_leaving(name))
        return ClusterSize(kinds, dict(self._num_changes), tuple(routers), self._failure())

    def give_up(self) -> None:
        for going in self._going.values():
            going.change.give_up()
        self._going.clear()

    def _bounds(self, counts: Mapping[SizedKind, tuple[int, int, int]]) -> dict[str, Bounds]:
        """Returns the bounds of all kinds that the cluster has; those of a fixed number are equal."""
        fixed = {kind: ready + starting for kind, (ready, starting, _) in counts.items()}
        return {
            kind: self._cluster.bounds.get(kind) or Bounds(number, number)
            for kind, number in fixed.items()
            if number or kind in self._cluster.bounds
        }

    def _start_s(self, kind: SizedKind) -> float:
        return self._cluster.start_s.get(kind, UNKNOWN_START_S)

    def _counts(self, kind: SizedKind) -> tuple[int, int, int]:
        """Returns the numbers of ready, starting and leaving processes; one that is restarted counts as starting."""
        names = self._cluster.names(kind)
        staying = [name for name in names if not self._is_leaving(name)]
        ready = sum(map(self._cluster.has_joined, staying))
        return ready, len(staying) - ready, len(names) - len(staying)

    def _is_leaving(self, name: str) -> bool:
        if self._cluster.is_evacuated(name):
            return True
        return name in self._going and not self._going[name].is_start

    def _failure(self) -> str:
        now = self._clock()
        for kind in self._cluster.bounds:
            starts = self._starts[kind]
            if starts.num_failed >= NUM_FAILURES and now < starts.not_before and not self._counts(kind)[0]:
                return starts.failure
        return ""

    def _continue(self) -> None:
        for name, going in list(self._going.items()):
            if not going.change.take_turn():
                continue
            del self._going[name]
            if going.is_start:
                self._has_started(name, going)

    def _has_started(self, name: str, going: _Going) -> None:
        starts, now = self._starts[going.kind], self._clock()
        if not going.change.error:
            starts.num_failed, starts.failure = 0, ""
            self._cluster.start_s[going.kind] = now - going.began
            return
        starts.num_failed += 1
        starts.failure = f"{NOUNS[going.kind]} cannot be started: {going.change.error}"
        delay_s = RETRY_S if starts.num_failed < NUM_FAILURES else LATER_RETRY_S
        starts.not_before = now + delay_s
        logger.error("%s; next try in %g s", starts.failure, delay_s)

    def _grow(self, kind: SizedKind, num_missing: int, begun: Sequence[SizedKind]) -> list[SizedKind]:
        """Returns the kind once for each process that begins to start."""
        for name in [name for name, going in self._going.items() if going.kind == kind and going.can_stay]:
            if num_missing > 0 and self._cluster.has_joined(name):
                num_missing -= 1
                self._note(kind, 1, f"{name} stays")
                del self._going[name]
                self._cluster.keep(name)
        starts, now = self._starts[kind], self._clock()
        if num_missing <= 0:
            starts.no_room = ""
        if num_missing <= 0 or now < starts.not_before:
            return []
        free = (name_of(kind, number) for number in range(self._cluster.bounds[kind].high))
        taken = self._cluster.names(kind)
        names = [name for name in free if name not in taken][:num_missing]
        changes: dict[str, Change] = {}
        no_room = ""
        while names and not changes:
            try:
                changes = self._cluster.join(kind, names, begun)
            except (ValueError, ClusterError) as error:
                no_room = str(error)
                names.pop()
        if no_room:
            starts.not_before = now + ROOM_INTERVAL_S
            if not starts.no_room:
                logger.warning("no more %s: %s", NOUNS[kind], no_room)
        starts.no_room = no_room
        if changes:
            self._note(kind, len(changes), f"starting {', '.join(changes)}")
            self._going |= {name: _Going(kind, change, is_start=True, began=now) for name, change in changes.items()}
        return [kind] * len(changes)

    def _shrink(self, kind: SizedKind, num_surplus: int, held: Collection[str]) -> None:
        if num_surplus <= 0:
            return
        free = [n for n in self._cluster.names(kind) if n not in held and not self._is_leaving(n)]
        # Those that are not ready first, then those with the highest numbers.
        order = sorted(free, key=lambda name: (self._cluster.has_joined(name), -number_of(name)))
        names = order[:num_surplus]
        if not names:
            return
        self._note(kind, -len(names), f"draining {', '.join(names)}")
        for name in names:
            self._begin_end(kind, name)

    def _begin_end(self, kind: SizedKind, name: str) -> None:
        if (start := self._going.get(name)) is not None:
            if start.change.is_waiting:
                self._going.pop(name).change.withdraw("it is not needed any more")
                return
            start.change.drop()
        if not self._cluster.has_joined(name):
            self._going[name] = _Going(kind, self._cluster.end(name), is_start=False, began=self._clock())
            return

        def cannot_stay() -> None:
            going.can_stay = False

        change = self._cluster.leave(name, cannot_stay)
        # A draining router has closed its ports.
        can_stay = kind != "router"
        going = self._going[name] = _Going(kind, change, is_start=False, began=self._clock(), can_stay=can_stay)

    def _note(self, kind: SizedKind, difference: int, what: str) -> None:
        """Call it before the counts change. Args: what: the processes that change."""
        reason = self._reasons[kind] = self._planner.reasons.get(kind, REPLACED)
        self._num_changes[kind, "up" if difference > 0 else "down", reason] += abs(difference)
        ready, starting, _ = self._counts(kind)
        was = ready + starting
        logger.warning("%s: %d -> %d (%s), %s", NOUNS[kind], was, was + difference, reason, what)


def name_of(kind: SizedKind, number: int) -> str:
    return f"{'worker' if kind == 'any' else kind}-{number}"


def number_of(name: str) -> int:
    return int(name.rpartition("-")[2])


def kind_of(worker: str) -> WorkerKind:
    """Returns the kind of a worker by its name, which `name_of` made."""
    kinds: dict[str, WorkerKind] = {name_of(kind, 0)[:-2]: kind for kind in WORKER_KINDS}
    return kinds[worker.rpartition("-")[0]]
