"""An actor around one process of the cluster."""

from typing import Protocol, TypeVar

from tandem.deploy.actors.stop_wait import StopWait
from tandem.deploy.on_ray.sealed_actor import SealedActor

T = TypeVar("T")


class Stoppable(Protocol):
    def stop(self) -> None: ...


class ProcessActor(SealedActor[T]):
    """Subclasses make the process in `start`. Requests and pages never travel over Ray."""

    _process: Stoppable | None

    def __init__(self, order: T | None) -> None:
        super().__init__(order)
        self._process = None
        self._stopped = StopWait()

    def wait_stopped(self) -> None:
        """Returns after `stop` or the next call of this method. The caller gets an error if the process dies."""
        self._stopped.wait()

    def stop(self) -> list[str]:
        """Returns lines of the process that are left to show."""
        if self._process is not None:
            self._process.stop()
        self._stopped.set()
        return []
