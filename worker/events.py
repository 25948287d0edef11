"""Events for a worker's engine thread. Links add their own (tandem.kvtransfer.events)."""

from collections.abc import Callable
from dataclasses import dataclass

from tandem.messages import RouterMessage, WorkerStats
from tandem.recording import Recording


class Event:
    __slots__ = ()


@dataclass(frozen=True, slots=True)
class FromRouter(Event):
    """A message from a router. Attributes: received_ns: its arrival; 0 if it did not come over a stream."""

    message: RouterMessage
    received_ns: int = 0


@dataclass(frozen=True, slots=True)
class RouterLost(Event):
    """A router's stream ended, and with it its attempts here. Attributes: router: its incarnation."""

    router: str


@dataclass(frozen=True, slots=True)
class AdaptersListed(Event):
    """The adapters that routers name, by content hash."""

    content_hashes: frozenset[str]


@dataclass(frozen=True, slots=True)
class AdapterLoaded(Event):
    """A load of an adapter has ended; wakes the scheduler."""


@dataclass(frozen=True, slots=True)
class Inspect(Event):
    """Asks for an integrity check. `reply` receives the violation, or "", and the statistics."""

    reply: Callable[[str, WorkerStats], None]


@dataclass(frozen=True, slots=True)
class StartRecording(Event):
    """Starts the engine thread's recorder."""


@dataclass(frozen=True, slots=True)
class StopRecording(Event):
    reply: Callable[[Recording], None]
