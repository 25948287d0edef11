"""Events for a worker's engine thread. Links add their own (tandem.kvtransfer.events)."""

from collections.abc import Callable
from dataclasses import dataclass

from tandem.messages import RouterMessage, WorkerStats
from tandem.recording import Recording


class Event:
    """Base of all events that a scheduler receives."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class FromRouter(Event):
    """A message from a router.

    Attributes:
        received_ns: arrival of the message (tandem.lifecycle.now_ns); 0 if it did not come over a stream.
    """

    message: RouterMessage
    received_ns: int = 0


@dataclass(frozen=True, slots=True)
class RouterLost(Event):
    """A router's stream ended, and with it all attempts of that router here.

    Attributes:
        router: incarnation of the router, as in its request ids.
    """

    router: str


@dataclass(frozen=True, slots=True)
class Inspect(Event):
    """Asks for an integrity check between two steps. `reply` receives the violation ("" if none) and the statistics."""

    reply: Callable[[str, WorkerStats], None]


@dataclass(frozen=True, slots=True)
class StartRecording(Event):
    """Starts the engine thread's recorder."""


@dataclass(frozen=True, slots=True)
class StopRecording(Event):
    """Stops the recorder. `reply` receives the recording."""

    reply: Callable[[Recording], None]
