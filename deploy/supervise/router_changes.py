"""Adds and drains routers while the cluster serves.

The ports of every router of the upper bound are held from the start, so clients, other routers and workers know the
addresses of routers that do not run. A draining router closes its ports to new requests and finishes its own.
"""

import contextlib
import logging
import time
from collections.abc import Generator, Iterator
from typing import Any, Protocol

from tandem.deploy.on_ray.ray_module import RayError, ray
from tandem.deploy.supervise.change import ChangeError, ChangeJob
from tandem.deploy.supervise.scaling import answers_of
from tandem.deploy.supervise.supervisor import ProcessKind, Supervisor

logger = logging.getLogger(__name__)

# A router's answer; it answers at once.
ANSWER_TIMEOUT_S = 6.0
STOP_TIMEOUT_S = 6.0


class Routers(Protocol):
    @property
    def drain_timeout_s(self) -> float: ...

    def actor(self, name: str) -> Any: ...

    def add_router(self, name: str) -> None: ...

    def remove_router(self, name: str) -> None: ...

    def tell_workers(self) -> list[Any]:
        """Tells the workers the routers that are to run."""


def join_router(cluster: Routers, supervisor: Supervisor, name: str, kind: ProcessKind) -> Iterator[None]:
    """Starts a router, in turns. Raises ChangeError: it could not start, and has been ended."""
    cluster.add_router(name)
    yield from answers_of(cluster.tell_workers())
    supervisor.add(name, kind)
    while not supervisor.has_joined(name):
        if why := supervisor.failure(name):
            yield from end_router(cluster, supervisor, name)
            raise ChangeError(f"{name}: {why}")
        yield
    # Workers that were joining at the first time may have missed it.
    yield from answers_of(cluster.tell_workers())


def leave_router(job: ChangeJob, cluster: Routers, supervisor: Supervisor, name: str) -> Iterator[None]:
    """Drains and ends a router, in turns."""
    supervisor.retire(name)
    if num_left := (yield from drain_router(job, name, cluster)):
        job.lines.put(f"Requests that go on at another router: {num_left}")
    yield from end_router(cluster, supervisor, name)
    logger.warning("%s has left", name)


def end_router(cluster: Routers, supervisor: Supervisor, name: str) -> Iterator[None]:
    supervisor.forget(name)
    if (actor := cluster.actor(name)) is not None:
        refs, deadline = [actor.stop.remote()], time.monotonic() + STOP_TIMEOUT_S
        while refs and time.monotonic() < deadline:
            _, refs = ray.wait(refs, num_returns=len(refs), timeout=0)
            yield
    cluster.remove_router(name)
    yield from answers_of(cluster.tell_workers())


class Drained(Protocol):
    @property
    def drain_timeout_s(self) -> float: ...

    def actor(self, name: str) -> Any: ...


def drain_router(
    job: ChangeJob, name: str, cluster: Drained, timeout_s: float | None = None
) -> Generator[None, None, int]:
    """Waits in turns until a router that takes no new requests has none; returns the number left after timeout_s.

    Args:
        timeout_s: None: drain_timeout_s.
    """
    deadline = time.monotonic() + (cluster.drain_timeout_s if timeout_s is None else timeout_s)
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
    num_left = 0
    with contextlib.suppress(RayError):
        num_left = ray.get(refs[0])
    return num_left
