"""Restarts one process of a serving cluster, perhaps as another version of tandem.

A router stops listening and lets its requests end; those left after the drain timeout go on at another router, or at
this one when it is back. A worker gets no new requests, as when it leaves; requests left restart elsewhere. A page
store ends at once, for workers serve without it.
"""

from collections.abc import Collection, Iterator
from typing import Any, Literal, Protocol

from tandem.deploy.supervise.change import Change, ChangeError, ChangeJob
from tandem.deploy.supervise.installed import CheckInstalled
from tandem.deploy.supervise.router_changes import drain_router
from tandem.deploy.supervise.scaling import Answers, answers_of, drained
from tandem.deploy.supervise.supervisor import Supervisor

RestartedKind = Literal["router", "worker", "store"]


class RestartJob(ChangeJob):
    """Attributes: process: name of the process to restart."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process


class Restarted(Protocol):
    @property
    def drain_timeout_s(self) -> float: ...

    def begin_leaving(self, names: Collection[str]) -> None: ...

    def let_stay(self, names: Collection[str]) -> None: ...

    def tell_routers(self) -> list[Any]: ...

    def is_planned(self, name: str) -> bool: ...

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

    def _run(self) -> Iterator[None]:
        # Before anything ends: another version on the disk may not fit the running processes.
        while (refusal := self._check.refusal()) is None:
            yield
        if refusal:
            raise ChangeError(refusal)
        if not self._supervisor.has_joined(self._name):
            raise ChangeError(f"{self._name} is starting already")
        try:
            if self._kind == "router":
                yield from self._drain_router()
            elif self._kind == "worker":
                yield from self._drain_worker()
            self._job.lines.put(f"{self._name}: starting again")
            self._supervisor.restart(self._name)
            while not self._supervisor.has_joined(self._name):
                if why := self._supervisor.failure(self._name):
                    raise ChangeError(f"{self._name}: {why}; it is tried again")
                if self._kind == "worker" and not self._cluster.is_planned(self._name):
                    raise ChangeError(f"{self._name} has left: its node is announced to go")
                yield
        finally:
            if self._kind == "worker":
                self._cluster.let_stay([self._name])
                self._cluster.tell_routers()
        self._job.lines.put(f"{self._name}: ready")

    def _drain_router(self) -> Iterator[None]:
        if num_left := (yield from drain_router(self._job, self._name, self._cluster)):
            self._job.lines.put(f"Requests that go on at another router: {num_left}")

    def _drain_worker(self) -> Iterator[None]:
        self._cluster.begin_leaving([self._name])

        def answers() -> Answers:
            return answers_of(self._cluster.tell_routers())

        if num_left := (
            yield from drained(self._job, self._name, [self._name], answers, self._cluster.drain_timeout_s)
        ):
            self._job.lines.put(f"Requests that begin again elsewhere: {num_left}")
