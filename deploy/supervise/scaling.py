"""Changes the number of workers while the cluster serves.

A leaving worker gets no new requests and finishes its own. Requests left after the drain timeout restart elsewhere.
"""

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol

from tandem.deploy.config.cluster_config import WorkerPlan
from tandem.deploy.errors import ClusterError
from tandem.deploy.on_ray.ray_module import RayError, ray
from tandem.deploy.supervise.supervisor import ProcessKind, Supervisor

logger = logging.getLogger(__name__)

# A new worker's first answer; loading may take longer.
PROCESS_START_TIMEOUT_S = 120.0
# After this time, the router is asked again.
ANSWER_TIMEOUT_S = 6.0
STOP_TIMEOUT_S = 6.0


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


class ScaleJob:
    """A requested change and its outcome. Methods may be called from any thread.

    Attributes:
        counts: requested numbers of workers by kind.
        lines: progress messages; None: the end.
        is_usage: the error is in the request.
    """

    def __init__(self, counts: Mapping[str, int]) -> None:
        self.counts = counts
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.error = ""
        self.is_usage = False

    def next_line(self, timeout_s: float) -> str | None:
        """Returns the next message; "" after timeout_s; None at the end."""
        try:
            return self.lines.get(timeout=timeout_s)
        except queue.Empty:
            return ""

    def finish(self, error: str = "", *, is_usage: bool = False) -> None:
        self.error, self.is_usage = error, is_usage
        self.lines.put(None)


class ScaleQueue:
    """Makes changes one after the other, on the supervising thread."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[ScaleJob] = queue.SimpleQueue()
        self._current: Change | None = None

    def ask(self, job: ScaleJob) -> None:
        self._jobs.put(job)

    def take_turn(self, plan: "Callable[[ScaleJob], Change]") -> None:
        """Continues a change or begins the next. `plan` raises ValueError or ClusterError for an impossible one."""
        if self._current is None:
            with contextlib.suppress(queue.Empty):
                job = self._jobs.get_nowait()
                try:
                    self._current = plan(job)
                except (ValueError, ClusterError) as error:
                    job.finish(str(error), is_usage=True)
        if self._current is not None and self._current.take_turn():
            self._current = None

    def give_up(self) -> None:
        if self._current is not None:
            self._current.give_up()
            self._current = None
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait().finish("the cluster is stopping")


class Change(Protocol):
    def take_turn(self) -> bool:
        """Goes on without waiting. Returns whether it is over."""

    def give_up(self) -> None: ...


class Scaled(Protocol):
    @property
    def drain_timeout_s(self) -> float: ...

    @property
    def worker_names(self) -> list[str]: ...

    def add_workers(self, plans: Mapping[str, WorkerPlan]) -> None: ...

    def remove_workers(self, names: Sequence[str]) -> None: ...

    def tell_routers(self, names: Sequence[str]) -> list[Any]: ...

    def actor(self, name: str) -> Any: ...


class Scaling:
    """One change, made in turns that never wait. Attributes: planned: workers that may get new requests."""

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
        self._job = job
        self._cluster = cluster
        self._supervisor = supervisor
        self._kind = kind
        self._joining = joining
        self._leaving = leaving
        self.planned = cluster.worker_names
        steps = [self._join, self._leave] if join_first else [self._leave, self._join]
        self._steps = self._run([step() for step in steps])

    def take_turn(self) -> bool:
        try:
            next(self._steps)
        except StopIteration:
            self._job.finish()
        except _JoinError as error:
            self._job.finish(str(error))
        else:
            return False
        return True

    def give_up(self) -> None:
        self._job.finish("the cluster is stopping")

    def _run(self, steps: Sequence[Iterator[None]]) -> Iterator[None]:
        for step in steps:
            yield from step

    def _join(self) -> Iterator[None]:
        if not self._joining:
            return
        self._cluster.add_workers(self._joining)
        self.planned = [*self.planned, *self._joining]
        # Routers give no work to workers that they do not expect.
        yield from self._answers()
        for name in self._joining:
            self._job.lines.put(f"{name}: starting")
            self._supervisor.add(name, self._kind)
        try:
            yield from self._joined()
        except _JoinError:
            self.planned = [name for name in self.planned if name not in self._joining]
            yield from self._end(list(self._joining))
            raise
        yield from self._answers()

    def _joined(self) -> Iterator[None]:
        began = time.monotonic()
        doing = dict.fromkeys(self._joining, "starting")
        silent = set(self._joining)
        asked: dict[Any, str] = {}
        while waited_for := [name for name in self._joining if not self._supervisor.has_joined(name)]:
            if failed := [(name, why) for name in waited_for if (why := self._supervisor.failure(name))]:
                name, why = failed[0]
                raise _JoinError(f"{name}: {why}; the cluster is as it was before")
            unheard = sorted(silent.intersection(waited_for))
            if unheard and time.monotonic() - began > PROCESS_START_TIMEOUT_S:
                raise _JoinError(
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
                        self._job.lines.put(f"{name}: {said}")
            yield
        for name, said in doing.items():
            if said != "ready":
                self._job.lines.put(f"{name}: ready")

    def _leave(self) -> Iterator[None]:
        if not self._leaving:
            return
        self.planned = [name for name in self.planned if name not in self._leaving]
        for name in self._leaving:
            self._supervisor.retire(name)
        deadline = time.monotonic() + self._cluster.drain_timeout_s
        shown = -1
        while True:
            answers = yield from self._answers()
            num_left = sum(answer.get(name, 0) for answer in answers or () for name in self._leaving)
            if answers is not None and num_left == 0:
                break
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                self._job.lines.put(f"Requests that begin again elsewhere: {num_left}")
                break
            if num_left != shown:
                self._job.lines.put(
                    f"{', '.join(self._leaving)}: requests left: {num_left}; waiting {remaining_s:.0f} s at most"
                )
                shown = num_left
            yield
        yield from self._end(self._leaving)
        for name in self._leaving:
            self._job.lines.put(f"{name}: has left")
            logger.warning("%s has left", name)

    def _end(self, names: Sequence[str]) -> Iterator[None]:
        for name in names:
            self._supervisor.forget(name)
        actors = [actor for name in names if (actor := self._cluster.actor(name)) is not None]
        refs = [actor.stop.remote() for actor in actors]
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while refs and time.monotonic() < deadline:
            _, refs = ray.wait(refs, num_returns=len(refs), timeout=0)
            yield
        self._cluster.remove_workers(names)
        yield from self._answers()

    def _answers(self) -> Generator[None, None, list[dict[str, int]] | None]:
        """Tells the routers the planned workers; returns their numbers of requests on other workers.

        None: a router did not answer. Dead routers have no requests.
        """
        return (yield from answers_of(self._cluster.tell_routers(self.planned)))


def answers_of(refs: Sequence[Any]) -> Generator[None, None, list[dict[str, int]] | None]:
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


class _JoinError(Exception):
    pass
