"""Changes the number of workers while the cluster serves.

A leaving worker gets no new requests and finishes its own. Requests left after the drain timeout restart elsewhere.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from itertools import chain
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
# Waits in turns for the routers' numbers of requests on workers; None: a router did not answer.
Answers: TypeAlias = Generator[None, None, list[dict[str, int]] | None]


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


class Scaled(Protocol):
    @property
    def drain_timeout_s(self) -> float: ...

    @property
    def worker_names(self) -> list[str]: ...

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
        steps = [self._join, self._leave] if join_first else [self._leave, self._join]
        super().__init__(job, chain.from_iterable(step() for step in steps))
        self._cluster = cluster
        self._supervisor = supervisor
        self._kind = kind
        self._joining = joining
        self._leaving = leaving
        self.planned = cluster.worker_names

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
        except ChangeError:
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
        label = ", ".join(self._leaving)
        num_left = yield from drained(self._job, label, self._leaving, self._answers, self._cluster.drain_timeout_s)
        if num_left is not None:
            self._job.lines.put(f"Requests that begin again elsewhere: {num_left}")
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

    def _answers(self) -> Answers:
        """Tells the routers the planned workers; returns their numbers of requests on other workers.

        None: a router did not answer. Dead routers have no requests.
        """
        return (yield from answers_of(self._cluster.tell_routers(self.planned)))


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
