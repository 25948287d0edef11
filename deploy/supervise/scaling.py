"""Changes the number of workers while the cluster serves.

A leaving worker gets no new requests and finishes its own. Requests left after the drain timeout restart elsewhere.
Workers without room wait for a node where Ray may add one. Other changes are made meanwhile.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from tandem.config import WorkerKind
from tandem.deploy.config.bounds import Bounds, SizedKind
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


def check_kinds(running: Mapping[WorkerKind, int], counts: Mapping[WorkerKind, int]) -> None:
    """Raises ValueError if linked workers (kind `any`) and workers with roles would exist together."""
    if not counts["any"] or counts["any"] == sum(counts.values()):
        return
    if running.get("any"):
        raise ValueError("all workers of this cluster are alike: say how many with num_any")
    roles = ", ".join(f"{count} {kind}" for kind, count in running.items() if count)
    raise ValueError(
        f"the workers of this cluster have roles ({roles}): say how many with num_prefill, num_decode and num_both"
    )


class ScaleJob(ChangeJob):
    """Attributes: counts: requested numbers of processes by kind, or bounds for them."""

    def __init__(self, counts: Mapping[SizedKind, int | Bounds]) -> None:
        super().__init__()
        self.counts = counts

    def replaces(self, other: ChangeJob) -> bool:
        return isinstance(other, ScaleJob)


class Scaled(Protocol):
    @property
    def drain_timeout_s(self) -> float: ...

    @property
    def node_timeout_s(self) -> float:
        """Limit of the wait for a node that Ray adds; 0.0: Ray adds none."""

    def reserve(self, names: Sequence[str]) -> None:
        """Asks Ray for the room of workers to come."""

    def is_placed(self, name: str) -> bool:
        """Returns whether a worker has its room."""

    def need_of(self, name: str) -> str:
        """Returns the resources of a worker as text."""

    def release(self, names: Sequence[str]) -> None:
        """Takes back `reserve`."""

    def is_planned(self, name: str) -> bool: ...

    def add_workers(self, plans: Mapping[str, WorkerPlan]) -> None: ...

    def remove_workers(self, names: Sequence[str]) -> None: ...

    def begin_leaving(self, names: Collection[str]) -> None:
        """Excludes workers from those that `tell_routers` names, until they are removed or stay."""

    def let_stay(self, names: Collection[str]) -> None: ...

    def tell_routers(self) -> list[Any]:
        """Tells the routers the workers that may get new requests."""

    def actor(self, name: str) -> Any: ...


class Scaling(Change):
    """Changes to given workers, those that join and those that leave."""

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
        last_steps: Iterable[None] = (),
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            last_steps: further steps of the change.
            on_done: called after a change that succeeded.
        """
        super().__init__(job, self._run(join_first=join_first))
        self._parts = job, cluster, supervisor
        self._kind = kind
        self._joining = joining
        self._leaving = leaving
        self._last_steps = last_steps
        self._on_done = on_done

    def _run(self, *, join_first: bool) -> Iterator[None]:
        if join_first:
            yield from self._join()
        yield from leave_steps(*self._parts, self._leaving)
        if not join_first:
            yield from self._join()
        yield from self._last_steps
        self._on_done()

    def _join(self) -> Iterator[None]:
        _, cluster, _ = self._parts
        try:
            yield from join_steps(*self._parts, self._kind, self._joining, self.wait)
        except ChangeError as error:
            others = [name for name in self._joining if cluster.is_planned(name)]
            rest = f"{', '.join(others)} joined" if others else "the cluster is as it was before"
            raise ChangeError(f"{error}; {rest}") from None


class Joining(Change):
    """Starts workers beside other changes."""

    def __init__(
        self, cluster: Scaled, supervisor: Supervisor, kind: ProcessKind, plans: Mapping[str, WorkerPlan]
    ) -> None:
        job = ChangeJob()
        super().__init__(job, join_steps(job, cluster, supervisor, kind, plans, self.wait))


def join_steps(
    job: ChangeJob,
    cluster: Scaled,
    supervisor: Supervisor,
    kind: ProcessKind,
    plans: Mapping[str, WorkerPlan],
    wait: Callable[[Callable[[], bool]], None],
) -> Iterator[None]:
    """Starts workers in turns, each group when it has room.

    Args:
        wait: called with a condition before a yield after which nothing happens until it holds.

    Raises:
        ChangeError: one could not start, and its group has been ended, or there was no room in time.
    """
    waiting = list(plans)
    if not waiting:
        return
    began, has_said = time.monotonic(), False
    try:
        try:
            cluster.reserve(waiting)
        except RayError as error:
            raise ChangeError(f"Ray reserves no room: {error}") from error
        while waiting:
            if placed := _placed(cluster, waiting):
                waiting = [name for name in waiting if name not in placed]
                yield from _start_steps(job, cluster, supervisor, kind, {name: plans[name] for name in placed})
                continue
            waited_s, limit_s = time.monotonic() - began, cluster.node_timeout_s
            if waited_s > max(limit_s, PLACED_TIMEOUT_S):
                raise ChangeError(_no_room(cluster, waiting, limit_s))
            if limit_s and waited_s > SETTLE_S:
                if not has_said:
                    has_said = True
                    needs = ", ".join(f"{name} needs {cluster.need_of(name)}" for name in waiting)
                    line = f"waiting for Ray to add a node: {needs}; {limit_s - waited_s:.0f} s at most"
                    job.lines.put(line)
                    logger.warning("%s", line)
                wait(_room_or_end(cluster, waiting, began + max(limit_s, PLACED_TIMEOUT_S)))
            yield
    finally:
        # Also if the steps are closed during the wait.
        cluster.release(waiting)


def _placed(cluster: Scaled, waiting: Sequence[str]) -> list[str]:
    """Returns the workers to start now: of each kind those before the first without room, so that numbers of withdrawn
    workers are the last ones."""
    placed, full = [], set[str]()
    for name in waiting:
        kind = name.rpartition("-")[0]
        if kind not in full and cluster.is_placed(name):
            placed.append(name)
        else:
            full.add(kind)
    return placed


def _room_or_end(cluster: Scaled, waiting: Sequence[str], end: float) -> Callable[[], bool]:
    return lambda: bool(_placed(cluster, waiting)) or time.monotonic() > end


def _no_room(cluster: Scaled, waiting: Sequence[str], limit_s: float) -> str:
    needs = " or ".join(dict.fromkeys(map(cluster.need_of, waiting)))
    if limit_s:
        return f"{', '.join(waiting)}: Ray has added no node within {limit_s:.0f} s for {needs}"
    return f"{', '.join(waiting)}: the Ray has no room any more for {needs}: others may have taken it"


def _start_steps(
    job: ChangeJob, cluster: Scaled, supervisor: Supervisor, kind: ProcessKind, plans: Mapping[str, WorkerPlan]
) -> Iterator[None]:
    cluster.add_workers(plans)
    # Routers give no work to workers that they do not expect.
    yield from answers_of(cluster.tell_routers())
    for name in plans:
        job.lines.put(f"{name}: starting")
        supervisor.add(name, kind)
    try:
        yield from _joined(job, cluster, supervisor, list(plans))
    except ChangeError:
        yield from end_steps(cluster, supervisor, list(plans))
        raise
    yield from answers_of(cluster.tell_routers())


def _joined(job: ChangeJob, cluster: Scaled, supervisor: Supervisor, names: Sequence[str]) -> Iterator[None]:
    began = time.monotonic()
    doing = dict.fromkeys(names, "starting")
    silent = set(names)
    asked: dict[Any, str] = {}
    while waited_for := [name for name in names if not supervisor.has_joined(name)]:
        if gone := [name for name in waited_for if not cluster.is_planned(name)]:
            raise ChangeError(f"{', '.join(gone)}: the node is announced to go")
        if failed := [(name, why) for name in waited_for if (why := supervisor.failure(name))]:
            name, why = failed[0]
            raise ChangeError(f"{name}: {why}")
        unheard = sorted(silent.intersection(waited_for))
        if unheard and time.monotonic() - began > PROCESS_START_TIMEOUT_S:
            raise ChangeError(f"no process for {', '.join(unheard)} within {PROCESS_START_TIMEOUT_S:.0f} s")
        for name in set(waited_for) - set(asked.values()):
            if (actor := cluster.actor(name)) is not None:
                asked[actor.progress.remote()] = name
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0) if asked else ([], [])
        for ref in answered:
            name = asked.pop(ref)
            with contextlib.suppress(RayError):
                said = str(ray.get(ref)).partition(" (")[0]
                silent.discard(name)
                if said != doing[name]:
                    doing[name] = said
                    job.lines.put(f"{name}: {said}")
        yield
    for name, said in doing.items():
        if said != "ready":
            job.lines.put(f"{name}: ready")


def leave_steps(
    job: ChangeJob,
    cluster: Scaled,
    supervisor: Supervisor,
    names: Sequence[str],
    on_drained: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Drains and ends workers, in turns. Args: on_drained: called when they end, and can no longer stay."""
    # One may have left with its node.
    names = [name for name in names if cluster.is_planned(name)]
    if not names:
        return
    cluster.begin_leaving(names)
    for name in names:
        supervisor.retire(name)
    num_left = yield from drained(
        job, ", ".join(names), names, lambda: answers_of(cluster.tell_routers()), cluster.drain_timeout_s
    )
    on_drained()
    if num_left is not None:
        job.lines.put(f"Requests that begin again elsewhere: {num_left}")
    yield from end_steps(cluster, supervisor, names)
    for name in names:
        job.lines.put(f"{name}: has left")
        logger.warning("%s has left", name)


def end_steps(cluster: Scaled, supervisor: Supervisor, names: Sequence[str]) -> Iterator[None]:
    """Ends workers at once, in turns."""
    cluster.begin_leaving(names)
    for name in names:
        supervisor.forget(name)
    actors = [actor for name in names if (actor := cluster.actor(name)) is not None]
    refs = [actor.stop.remote() for actor in actors]
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while refs and time.monotonic() < deadline:
        _, refs = ray.wait(refs, num_returns=len(refs), timeout=0)
        yield
    cluster.remove_workers(names)
    yield from answers_of(cluster.tell_routers())


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
