"""Changes the number of workers while the cluster serves.

A leaving worker gets no new requests and finishes its own. Requests left after the drain timeout restart elsewhere.
Workers without room wait for a node where Ray may add one. Other changes are made meanwhile.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from tandem.deploy.config.cluster_config import WorkerPlan
from tandem.deploy.on_ray.ray_module import RayError, ray
from tandem.deploy.supervise.change import Change, ChangeError, ChangeJob
from tandem.deploy.supervise.supervisor import ProcessKind, Supervisor

logger = logging.getLogger(__name__)

# A new worker's first answer; loading may take longer.
PROCESS_START_TIMEOUT_S = 120.0
# After this time, the router is asked again.
ANSWER_TIMEOUT_S = 6.0
STOP_TIMEOUT_S = 6.0
# Ray takes the room of a process within this time where there is some.
PLACED_TIMEOUT_S = 10.0
# After this time without room, a scale-up says that it waits.
SETTLE_S = 3.0
# Waits in turns for the routers' numbers of requests on workers; None: a router did not answer.
Answers: TypeAlias = Generator[None, None, list[dict[str, int]] | None]
Steps: TypeAlias = Generator[None, None, None]


def in_counts(counts: Mapping[str, int]) -> dict[str, Any]:
    return {f"num_{role}": count for role, count in counts.items()}


def check_kinds(running: Mapping[str, int], counts: Mapping[str, int]) -> None:
    """Raises ValueError if linked workers (kind `any`) and workers with roles would exist together."""
    if not counts["any"] or counts["any"] == sum(counts.values()):
        return
    if running.get("any"):
        raise ValueError(f"the {running['any']} workers of this cluster are all alike: say how many with num_any")
    roles = ", ".join(f"{count} {kind}" for kind, count in running.items() if count)
    raise ValueError(
        f"the workers of this cluster have roles ({roles}): say how many with num_prefill, num_decode and num_both"
    )


class ScaleJob(ChangeJob):
    """Attributes: counts: requested numbers of workers by kind."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        super().__init__()
        self.counts = counts

    def replaces(self, other: ChangeJob) -> bool:
        return isinstance(other, ScaleJob)


class Scaled(Protocol):
    @property
    def drain_timeout_s(self) -> float: ...

    @property
    def worker_names(self) -> list[str]: ...

    @property
    def node_timeout_s(self) -> float:
        """Limit of the wait for a node that Ray adds; 0.0: Ray adds none."""
        ...

    def reserve(self, names: Sequence[str]) -> None:
        """Asks Ray for the room of workers to come."""

    def is_placed(self, name: str) -> bool: ...

    def need_of(self, name: str) -> str:
        """Returns the resources of a worker as text."""
        ...

    def release(self, names: Sequence[str]) -> None:
        """Takes back `reserve`."""

    def add_workers(self, plans: Mapping[str, WorkerPlan]) -> None: ...

    def remove_workers(self, names: Sequence[str]) -> None: ...

    def tell_routers(self, names: Sequence[str]) -> list[Any]: ...

    def actor(self, name: str) -> Any: ...


class Scaling(Change):
    """Attributes: planned: workers that may get new requests."""

    def __init__(
        self,
        job: ScaleJob,
        cluster: Scaled,
        supervisor: Supervisor,
        kind: ProcessKind,
        joining: Mapping[str, WorkerPlan],
        leaving: Sequence[str],
        *,
        join_first: bool,
    ) -> None:
        super().__init__(job, self._run(join_first))
        self._cluster = cluster
        self._supervisor = supervisor
        self._kind = kind
        self._joining = joining
        self._leaving = leaving
        self.planned = cluster.worker_names
        self._said_wait = False

    def _run(self, join_first: bool) -> Steps:
        for step in (self._join, self._leave) if join_first else (self._leave, self._join):
            yield from step()

    def _join(self) -> Steps:
        waiting = list(self._joining)
        if not waiting:
            return
        self._cluster.reserve(waiting)
        began = time.monotonic()
        try:
            while waiting:
                if placed := self._placed(waiting):
                    waiting = [name for name in waiting if name not in placed]
                    yield from self._join_placed({name: self._joining[name] for name in placed})
                else:
                    yield from self._wait_for_room(waiting, began)
        finally:
            # Also if the steps are closed during the wait.
            self._cluster.release(waiting)

    def _placed(self, waiting: Sequence[str]) -> list[str]:
        """Returns the workers to start now: of each kind those before the first without room, so that numbers of
        withdrawn workers are the last ones."""
        placed, full = [], set[str]()
        for name in waiting:
            kind = name.rpartition("-")[0]
            if kind not in full and self._cluster.is_placed(name):
                placed.append(name)
            else:
                full.add(kind)
        return placed

    def _wait_for_room(self, waiting: Sequence[str], began: float) -> Steps:
        limit_s = self._cluster.node_timeout_s
        waited_s = time.monotonic() - began
        if waited_s > max(limit_s, PLACED_TIMEOUT_S):
            names, needs = ", ".join(waiting), " or ".join(dict.fromkeys(map(self._cluster.need_of, waiting)))
            if limit_s:
                raise ChangeError(
                    f"{names}: Ray has added no node within {limit_s:.0f} s for {needs}; the other workers stay as "
                    "they are"
                )
            raise ChangeError(f"{names}: the Ray has no room any more for {needs}: others may have taken it")
        if limit_s and waited_s > SETTLE_S:
            if not self._said_wait:
                self._said_wait = True
                needs = ", ".join(f"{name} needs {self._cluster.need_of(name)}" for name in waiting)
                line = f"waiting for Ray to add a node: {needs}; {limit_s - waited_s:.0f} s at most"
                self.job.lines.put(line)
                logger.warning("%s", line)
            self._may_go_on = lambda: (
                bool(self._placed(waiting)) or time.monotonic() - began > max(limit_s, PLACED_TIMEOUT_S)
            )
        yield

    def _join_placed(self, joining: Mapping[str, WorkerPlan]) -> Steps:
        self._cluster.add_workers(joining)
        self.planned = self._cluster.worker_names
        # Routers give no work to workers that they do not expect.
        yield from self._answers()
        for name in joining:
            self.job.lines.put(f"{name}: starting")
            self._supervisor.add(name, self._kind)
        try:
            yield from self._joined(joining)
        except ChangeError:
            self.planned = [name for name in self.planned if name not in joining]
            yield from self._end(list(joining))
            raise
        yield from self._answers()

    def _joined(self, joining: Collection[str]) -> Steps:
        began = time.monotonic()
        doing = dict.fromkeys(joining, "starting")
        silent = set(joining)
        asked: dict[Any, str] = {}
        while waited_for := [name for name in joining if not self._supervisor.has_joined(name)]:
            if gone := set(waited_for).difference(self._cluster.worker_names):
                raise ChangeError(f"{', '.join(sorted(gone))}: the node is announced to go")
            if failed := [(name, why) for name in waited_for if (why := self._supervisor.failure(name))]:
                name, why = failed[0]
                raise ChangeError(f"{name}: {why}; the cluster is as it was before")
            unheard = sorted(silent.intersection(waited_for))
            if unheard and time.monotonic() - began > PROCESS_START_TIMEOUT_S:
                raise ChangeError(
                    f"no process for {', '.join(unheard)} within {PROCESS_START_TIMEOUT_S:.0f} s; the cluster "
                    "is as it was before"
                )
            for name in set(waited_for) - set(asked.values()):
                if (actor := self._cluster.actor(name)) is not None:
                    asked[actor.progress.remote()] = name
            answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0) if asked else ([], [])
            for ref in answered:
                name = asked.pop(ref)
                with contextlib.suppress(RayError):
                    said = str(ray.get(ref)).partition(" (")[0]
                    silent.discard(name)
                    if said != doing[name]:
                        doing[name] = said
                        self.job.lines.put(f"{name}: {said}")
            yield
        for name, said in doing.items():
            if said != "ready":
                self.job.lines.put(f"{name}: ready")

    def _leave(self) -> Steps:
        # One may have left with its node.
        names = self._cluster.worker_names
        leaving = [name for name in self._leaving if name in names]
        if not leaving:
            return
        self.planned = [name for name in names if name not in leaving]
        for name in leaving:
            self._supervisor.retire(name)
        label = ", ".join(leaving)
        num_left = yield from drained(self.job, label, leaving, self._answers, self._cluster.drain_timeout_s)
        if num_left is not None:
            self.job.lines.put(f"Requests that begin again elsewhere: {num_left}")
        yield from self._end(leaving)
        for name in leaving:
            self.job.lines.put(f"{name}: has left")
            logger.warning("%s has left", name)

    def _end(self, names: Sequence[str]) -> Steps:
        yield from ended(self._cluster, self._supervisor, names)
        yield from self._answers()

    def _answers(self) -> Answers:
        """Tells the routers the planned workers; returns their numbers of requests on other workers.

        None: a router did not answer. Dead routers have no requests.
        """
        return (yield from answers_of(self._cluster.tell_routers(self.planned)))


def ended(cluster: Scaled, supervisor: Supervisor, names: Sequence[str]) -> Steps:
    """Ends workers in turns and frees their room."""
    for name in names:
        supervisor.forget(name)
    actors = [actor for name in names if (actor := cluster.actor(name)) is not None]
    refs = [actor.stop.remote() for actor in actors]
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while refs and time.monotonic() < deadline:
        _, refs = ray.wait(refs, num_returns=len(refs), timeout=0)
        yield
    cluster.remove_workers(names)


def answers_of(refs: Sequence[Any]) -> Answers:
    """Waits in turns for the answers of RouterActor.set_workers. None: a router did not answer."""
    waiting, deadline = list(refs), time.monotonic() + ANSWER_TIMEOUT_S
    while waiting:
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        if waiting:
            if time.monotonic() > deadline:
                return None
            yield
    answers = []
    for ref in refs:
        with contextlib.suppress(RayError):
            answers.append(ray.get(ref))
    return answers


def drained(
    job: ChangeJob, label: str, names: Collection[str], answers: Callable[[], Answers], timeout_s: float
) -> Generator[None, None, int | None]:
    """Waits in turns until these workers have no requests; returns None then, or the number left after timeout_s.

    Args:
        label: names the workers in messages.
        answers: asks the routers, as `answers_of`.
    """
    deadline, shown = time.monotonic() + timeout_s, -1
    while True:
        told = yield from answers()
        num_left = sum(answer.get(name, 0) for answer in told or () for name in names)
        if told is not None and not num_left:
            return None
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return num_left
        if num_left != shown:
            job.say_left(label, num_left, remaining_s)
            shown = num_left
        yield
