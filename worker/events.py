"""What the asyncio thread of a worker tells its engine thread. Links add events of their own
(tandem.kvtransfer.events)."""

from collections.abc import Callable
from dataclasses import dataclass

from tandem.messages import RouterMessage, WorkerStats
from tandem.recording import Recording


class Event:
    """Something a scheduler is told of."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class FromRouter(Event):
    """
    Attributes:
        received_ns: when the message came (tandem.lifecycle.now_ns); 0: it did not come over a stream.
    """

    message: RouterMessage
    received_ns: int = 0


@dataclass(frozen=True, slots=True)
class RouterLost(Event):
    """The stream of a router ended: so did every attempt it had here.

    Attributes:
        router: names that life of it, as the ids of its requests do.
    """

    router: str


@dataclass(frozen=True, slots=True)
class Inspect(Event):
    """Asks for an integrity check between two steps; `reply` gets the violation ("" if none) and the stats."""

    reply: Callable[[str, WorkerStats], None]


@dataclass(frozen=True, slots=True)
class StartRecording(Event):
    """From now on the engine thread's recorder keeps what it is told."""


@dataclass(frozen=True, slots=True)
class StopRecording(Event):
    """Ends that; `reply` gets what was kept."""

    reply: Callable[[Recording], None]
