"""Empties nodes that are announced to go, such as spot machines.

Other workers start elsewhere where there is room, then the node's workers leave, at the latest so that their requests
have the drain timeout before the node ends. What is left then restarts elsewhere. Routers leave if another one serves.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from tandem.deploy.config.cluster_config import WorkerPlan
from tandem.deploy.supervise.change import Change, ChangeJob
from tandem.deploy.supervise.router_changes import Drained, drain_router
from tandem.deploy.supervise.scaling import Answers, Scaled, answers_of, drained, end_steps
from tandem.deploy.supervise.supervisor import ProcessKind, Supervisor

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 2.0
# For the end of processes, and for what the notice was late.
MARGIN_S = 5.0


class LeavingNodes:
    """Looks for nodes announced to go that have processes of the cluster.

    Each look is complete, so a new supervisor and processes that were busy at first are served too.
    """

    def __init__(
        self,
        look: Callable[[], Mapping[str, float]],
        processes_on: Callable[[str], Sequence[str]],
        unsaid_s: float,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            look: returns the end of each such node, as of `wall_clock`, by id; 0.0: not said.
            processes_on: returns the names of a node's processes.
            unsaid_s: time until an end that is not said.
        """
        self._look = look
        self._processes_on = processes_on
        self._unsaid_s = unsaid_s
        self._wall_clock = wall_clock
        self._clock = clock
        self._look_at = clock()
        self._ends: dict[str, float] = {}

    def take(self) -> dict[str, float] | None:
        """Returns the end, as of `clock`, of each process on such a node; None between looks."""
        now = self._clock()
        if now < self._look_at:
            return None
        self._look_at = now + LOOK_INTERVAL_S
        found = self._look()
        self._ends = {node_id: end for node_id, end in self._ends.items() if node_id in found}
        ends: dict[str, float] = {}
        for node_id, said in found.items():
            names = self._processes_on(node_id)
            if node_id not in self._ends:
                left_s = max(0.0, said - self._wall_clock()) if said else self._unsaid_s
                self._ends[node_id] = now + left_s
                if names:
                    limit = f"in {left_s:.0f} s" if said else "at a time not said"
                    logger.warning("a node of Ray is announced to go %s; on it: %s", limit, ", ".join(names))
            ends |= dict.fromkeys(names, self._ends[node_id])
        return ends


class Evacuating(Change):
    """Replaces workers whose node goes."""

    def __init__(
        self,
        cluster: Scaled,
        supervisor: Supervisor,
        kind: ProcessKind,
        joining: Mapping[str, WorkerPlan],
        leaving: Sequence[str],
        end: float,
    ) -> None:
        """
        Args:
            joining: plans of workers whose room is reserved.
            end: of the node, as of time.monotonic.
        """
        super().__init__(ChangeJob(), self._run())
        self._cluster = cluster
        self._supervisor = supervisor
        self._kind = kind
        self._joining = joining
        self._leaving = leaving
        self._end = end

    def _run(self) -> Iterator[None]:
        self._cluster.add_workers(self._joining)
        yield from self._answers()
        for name in self._joining:
            # Without room, the supervisor starts it later.
            self._supervisor.add(name, self._kind)
        leave_at = self._end - self._cluster.drain_timeout_s - MARGIN_S
        while time.monotonic() < leave_at and not all(map(self._supervisor.has_joined, self._joining)):
            yield
        self._cluster.begin_leaving(self._leaving)
        for name in self._leaving:
            self._supervisor.retire(name)
        timeout_s = _drain_timeout_s(self._cluster, self._end)
        label = ", ".join(self._leaving)
        logger.warning("%s: leaving the node that goes, within %.0f s", label, timeout_s)
        num_left = yield from drained(self.job, label, self._leaving, self._answers, timeout_s)
        if num_left:
            logger.warning("%s: requests that begin again elsewhere: %d", label, num_left)
        yield from end_steps(self._cluster, self._supervisor, self._leaving)
        for name in self._leaving:
            logger.warning("%s has left", name)

    def _answers(self) -> Answers:
        return answers_of(self._cluster.tell_routers())


class RouterLeaving(Change):
    """Drains and ends a router whose node goes. It starts again if a node of its address comes."""

    def __init__(self, name: str, cluster: Drained, supervisor: Supervisor, end: float) -> None:
        """Args: end: of the node, as of time.monotonic."""
        super().__init__(ChangeJob(), self._run())
        self._name = name
        self._cluster = cluster
        self._supervisor = supervisor
        self._end = end

    def _run(self) -> Iterator[None]:
        timeout_s = _drain_timeout_s(self._cluster, self._end)
        logger.warning("%s: leaving the node that goes, within %.0f s", self._name, timeout_s)
        num_left = yield from drain_router(self.job, self._name, self._cluster, timeout_s)
        if num_left:
            logger.warning("%s: requests that go on at another router: %d", self._name, num_left)
        self._supervisor.restart(self._name)


def may_leave(router: str, serving: Iterable[str], leaving: Collection[str]) -> bool:
    """Returns whether a router serves that does not leave."""
    return any(name != router and name not in leaving for name in serving)


def _drain_timeout_s(cluster: Drained, end: float) -> float:
    return min(cluster.drain_timeout_s, max(0.0, end - MARGIN_S - time.monotonic()))
