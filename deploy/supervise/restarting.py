"""Restarts one process of a serving cluster, perhaps as another version of tandem.

A router stops listening and lets its requests end; those left after the drain timeout go on at another router, or at
this one when it is back. A worker gets no new requests, as when it leaves; requests left restart elsewhere. A page
store ends at once, for workers serve without it.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Literal, Protocol

from tandem.deploy.on_ray.ray_module import RayError, ray
from tandem.deploy.supervise.change import Change, ChangeError, ChangeJob
from tandem.deploy.supervise.installed import CheckInstalled
from tandem.deploy.supervise.scaling import Answers, answers_of, drained
from tandem.deploy.supervise.supervisor import Supervisor

# A router's answer; it answers at once.
ANSWER_TIMEOUT_S = 6.0
RestartedKind = Literal["router", "worker", "store"]


class RestartJob(ChangeJob):
    """Attributes: process: name of the process to restart."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process


class Restarted(Protocol):
    @property
    def drain_timeout_s(self) -> float: ...

    @property
    def worker_names(self) -> list[str]: ...

    def tell_routers(self, names: Sequence[str]) -> list[Any]: ...

    def actor(self, name: str) -> Any: ...


class Restarting(Change):
    def __init__(
        self, job: RestartJob, cluster: Restarted, supervisor: Supervisor, check: CheckInstalled, kind: RestartedKind
    ) -> None:
        super().__init__(job, self._run())
        self._name = job.process
        self._cluster = cluster
        self._supervisor = supervisor
        self._check = check
        self._kind = kind

    def give_up(self) -> None:
        self._check.give_up()
        super().give_up()

    def _run(self) -> Generator[None, None, None]:
        # Before anything ends: another version on the disk may not fit the running processes.
        while (refusal := self._check.refusal()) is None:
            yield
        if refusal:
            raise ChangeError(refusal)
        if not self._supervisor.has_joined(self._name):
            raise ChangeError(f"{self._name} is starting already")
        planned = self._cluster.worker_names
        try:
            if self._kind == "router":
                yield from self._drain_router()
            elif self._kind == "worker":
                yield from self._drain_worker()
            self.job.lines.put(f"{self._name}: starting again")
            self._supervisor.restart(self._name)
            while not self._supervisor.has_joined(self._name):
                if why := self._supervisor.failure(self._name):
                    raise ChangeError(f"{self._name}: {why}; it is tried again")
                if self._kind == "worker" and self._name not in self._cluster.worker_names:
                    raise ChangeError(f"{self._name} has left: its node is announced to go")
                yield
        finally:
            if self._kind == "worker":
                self._cluster.tell_routers(planned)
        self.job.lines.put(f"{self._name}: ready")

    def _drain_router(self) -> Iterator[None]:
        num_left = yield from router_drained(self.job, self._name, self._cluster, self._cluster.drain_timeout_s)
        if num_left:
            self.job.lines.put(f"Requests that go on at another router: {num_left}")

    def _drain_worker(self) -> Iterator[None]:
        others = [name for name in self._cluster.worker_names if name != self._name]

        def answers() -> Answers:
            return answers_of(self._cluster.tell_routers(others))

        if num_left := (yield from drained(self.job, self._name, [self._name], answers, self._cluster.drain_timeout_s)):
            self.job.lines.put(f"Requests that begin again elsewhere: {num_left}")


def router_drained(job: ChangeJob, name: str, cluster: Restarted, timeout_s: float) -> Generator[None, None, int]:
    """Lets a router leave, in turns; returns the number of requests left when it has none or after timeout_s."""
    deadline = time.monotonic() + timeout_s
    shown, num_left = -1, 0
    while (actor := cluster.actor(name)) is not None:
        num_left = yield from _num_left(actor)
        remaining_s = deadline - time.monotonic()
        if not num_left or remaining_s <= 0:
            break
        if num_left != shown:
            job.say_left(name, num_left, remaining_s)
            shown = num_left
        yield
    return num_left


def _num_left(actor: Any) -> Generator[None, None, int]:
    refs, deadline = [actor.leave.remote()], time.monotonic() + ANSWER_TIMEOUT_S
    while not ray.wait(refs, num_returns=1, timeout=0)[0]:
        if time.monotonic() > deadline:
            return 0
        yield
    try:
        num_left: int = ray.get(refs[0])
    except RayError:
        return 0
    return num_left
