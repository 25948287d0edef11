"""Another number of workers, while the cluster serves.

A request is never lost by it: a worker that is too many gets no new requests, those that it has go on, and what it has
left when its time is over is begun again elsewhere, like that of a worker that has died.
"""

import contextlib
import queue
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol

from tandem.deploy.config.cluster_config import WorkerPlan
from tandem.deploy.errors import ClusterError
from tandem.deploy.on_ray.ray_module import RayError, ray
from tandem.deploy.supervise.supervisor import ProcessKind, Supervisor

# Until a new worker's process is there and answers, whatever it has yet to load.
PROCESS_START_TIMEOUT_S = 120.0
# A router that does not say within this time what a worker has left is asked again.
ANSWER_TIMEOUT_S = 6.0
STOP_TIMEOUT_S = 6.0


def in_counts(counts: Mapping[str, int]) -> dict[str, Any]:
    """Numbers of workers by their roles, as fields of a ClusterConfig."""
    return {f"num_{role}": count for role, count in counts.items()}


def check_kinds(running: Mapping[str, int], counts: Mapping[str, int]) -> None:
    """Args: running, counts: numbers of workers by their kinds: of those that there are, and as they are to be.

    Raises:
        ValueError: there would be workers that are all alike beside others.
    """
    if not counts["any"] or counts["any"] == sum(counts.values()):
        return
    if running.get("any"):
        raise ValueError(f"the {running['any']} workers of this cluster are all alike: say how many with num_any")
    roles = ", ".join(f"{count} {kind}" for kind, count in running.items() if count)
    raise ValueError(
        f"the workers of this cluster have roles ({roles}): say how many with num_prefill, num_decode and num_both"
    )


class ScaleJob:
    """What somebody has asked for, and what becomes of it; its methods may be called from any thread.

    Attributes:
        counts: how many workers there are to be, of each role that is named.
        lines: what is being done, for a person; None: it is over.
        error: why it could not be done, or "".
        is_usage: whether the one who asked can put that right.
    """

    def __init__(self, counts: Mapping[str, int]) -> None:
        self.counts = counts
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.error = ""
        self.is_usage = False

    def next_line(self, timeout_s: float) -> str | None:
        """What is being done; "" if nothing was said for timeout_s; None: it is over."""
        try:
            return self.lines.get(timeout=timeout_s)
        except queue.Empty:
            return ""

    def finish(self, error: str = "", *, is_usage: bool = False) -> None:
        """To be called once, by whoever did it."""
        self.error, self.is_usage = error, is_usage
        self.lines.put(None)


class ScaleQueue:
    """What was asked for and is still to be done: one change after the other, by the thread that supervises."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[ScaleJob] = queue.SimpleQueue()
        self._current: Scaling | None = None

    def ask(self, counts: Mapping[str, int]) -> ScaleJob:
        """May be called from any thread."""
        job = ScaleJob(counts)
        self._jobs.put(job)
        return job

    def take_turn(self, plan: "Callable[[ScaleJob], Scaling]") -> None:
        """Goes on with a change, or begins the next, as far as that takes no waiting.

        Args:
            plan: what a change consists of; raises ValueError or ClusterError for one that cannot be made.
        """
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
        """The cluster stops: nothing of it is done any more."""
        if self._current is not None:
            self._current.give_up()
            self._current = None
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait().finish("the cluster is stopping")


class Scaled(Protocol):
    """What a change needs of the cluster; Cluster says what each does."""

    @property
    def drain_timeout_s(self) -> float: ...

    @property
    def worker_names(self) -> list[str]: ...

    def add_workers(self, plans: Mapping[str, WorkerPlan]) -> None: ...

    def remove_workers(self, names: Sequence[str]) -> None: ...

    def tell_routers(self, names: Sequence[str]) -> list[Any]: ...

    def actor(self, name: str) -> Any: ...


class Scaling:
    """One change, made in turns that never wait.

    Attributes:
        planned: the workers that new requests may go to.
    """

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
        """
        Args:
            kind: what the supervisor does with workers.
            joining: the new workers, by their names.
            leaving: the names of those that are too many.
            join_first: False: there is no room for the new ones before the others are gone.
        """
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
        """Goes on as far as that takes no waiting; returns whether it is over."""
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
        """The cluster stops, and its workers with it."""
        self._job.finish("the cluster is stopping")

    def _run(self, steps: Sequence[Iterator[None]]) -> Iterator[None]:
        for step in steps:
            yield from step

    def _join(self) -> Iterator[None]:
        if not self._joining:
            return
        self._cluster.add_workers(self._joining)
        self.planned = [*self.planned, *self._joining]
        # Routers know them before they join: whom they do not expect gets nothing to do.
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
        # One that was away, or busy, when they were asked for.
        yield from self._answers()

    def _joined(self) -> Iterator[None]:
        """Returns when all new workers take part."""
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
                    # How much of a stage is done is for those who look at it live.
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

    def _end(self, names: Sequence[str]) -> Iterator[None]:
        """Ends these, which are not planned any more."""
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
        """Tells the routers who is planned; returns what each says that the others have in hand, or None if one has
        not answered. One that is dead has nothing."""
        refs = self._cluster.tell_routers(self.planned)
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
    """A new worker cannot be started; the message is for the person who asked for it."""
