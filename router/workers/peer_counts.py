"""Loads reported by the other routers, so that limits and loads apply to the whole cluster."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

# A router silent for this many seconds is gone, with its requests.
FRESH_S = 2.0


class AssignedLoad(NamedTuple):
    """Fields as in `Worker`."""

    num_requests: int = 0
    num_pending_tokens: int = 0
    num_decoding: int = 0
    num_kv_tokens: int = 0
    num_arriving_tokens: int = 0

    def plus(self, other: "AssignedLoad") -> "AssignedLoad":
        return AssignedLoad(*map(operator.add, self, other))

    def minus(self, other: "AssignedLoad") -> "AssignedLoad":
        return AssignedLoad(*map(operator.sub, self, other))


NOTHING = AssignedLoad()


@dataclass(frozen=True, slots=True)
class RouterCounts:
    """
    Attributes:
        num_queued: requests without a first token.
        head_starts: ids of streams whose head start was used up there lately.
        num_requests_by_key: requests by digest of the API key; empty if keys have no limits.
    """

    num_requests: int
    num_queued: int
    num_requests_by_key: Mapping[str, int] = field(default_factory=dict)
    assigned: Mapping[str, AssignedLoad] = field(default_factory=dict)
    pid: int = 0
    head_starts: Sequence[bytes] = ()


class PeerCounts:
    def __init__(self, clock: Callable[[], float], learn: Callable[[Sequence[bytes]], None] | None = None) -> None:
        """Args: learn: gets each router's head_starts."""
        self._clock = clock
        self._learn = learn
        self._counts: dict[str, tuple[float, RouterCounts]] = {}
        # Sums over all routers, kept by differences: routers report ten times a second, each about every worker.
        self._assigned: dict[str, AssignedLoad] = {}
        self._changed: set[str] = set()

    def knows(self, router_id: str) -> bool:
        """Returns whether a router's last whole load was not forgotten."""
        return router_id in self._counts

    def record(self, router_id: str, counts: RouterCounts, *, is_change: bool = False) -> None:
        """Args: is_change: `counts.assigned` has only the workers whose load has changed since the last call."""
        _, before = self._counts.get(router_id, (0.0, None))
        assigned = dict(before.assigned) if before is not None else {}
        gone = {} if is_change else {worker_id: NOTHING for worker_id in assigned if worker_id not in counts.assigned}
        for worker_id, load in (*counts.assigned.items(), *gone.items()):
            self._set_assigned(assigned, worker_id, load)
        self._counts[router_id] = self._clock(), replace(counts, assigned=assigned)
        if self._learn is not None and counts.head_starts:
            self._learn(counts.head_starts)

    def forget(self, router_id: str) -> None:
        _, counts = self._counts.pop(router_id, (0.0, None))
        if counts is not None:
            assigned = dict(counts.assigned)
            for worker_id in counts.assigned:
                self._set_assigned(assigned, worker_id, NOTHING)

    def forget_silent(self) -> None:
        for router_id in [name for name in self._counts if self.counts_of(name) is None]:
            self.forget(router_id)

    def take_changed(self) -> dict[str, AssignedLoad]:
        """Returns the loads of the workers whose load has changed since the last call."""
        changed, self._changed = self._changed, set()
        return {worker_id: self.assigned_to(worker_id) for worker_id in changed}

    def counts_of(self, router_id: str) -> RouterCounts | None:
        """Returns None after FRESH_S of silence."""
        heard_at, counts = self._counts.get(router_id, (-FRESH_S, None))
        return counts if self._clock() - heard_at < FRESH_S else None

    @property
    def num_requests(self) -> int:
        return sum(counts.num_requests for counts in self._fresh())

    @property
    def num_queued(self) -> int:
        return sum(counts.num_queued for counts in self._fresh())

    def num_requests_of(self, key_digest: str) -> int:
        return sum(counts.num_requests_by_key.get(key_digest, 0) for counts in self._fresh())

    def assigned_to(self, worker_id: str) -> AssignedLoad:
        return self._assigned.get(worker_id, NOTHING)

    def _set_assigned(self, assigned: dict[str, AssignedLoad], worker_id: str, load: AssignedLoad) -> None:
        """Args: assigned: of the one router whose load on the worker this is."""
        before = assigned.pop(worker_id, NOTHING)
        if load != NOTHING:
            assigned[worker_id] = load
        if load == before:
            return
        self._changed.add(worker_id)
        total = self.assigned_to(worker_id).plus(load.minus(before))
        if total == NOTHING:
            del self._assigned[worker_id]
        else:
            self._assigned[worker_id] = total

    def _fresh(self) -> Iterator[RouterCounts]:
        for router_id in self._counts:
            if (counts := self.counts_of(router_id)) is not None:
                yield counts
