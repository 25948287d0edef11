"""Events from a worker's session with the page store to its engine thread."""

from collections.abc import Callable
from dataclasses import dataclass

from tandem.pagestore.messages import StoreServerMessage
from tandem.worker.events import Event


class StoreEvent(Event):
    __slots__ = ()


@dataclass(frozen=True, slots=True)
class StoreOpened(StoreEvent):
    """A session began. Attributes: num_slots: size of the region in pages."""

    epoch: str
    num_slots: int


@dataclass(frozen=True, slots=True)
class FromStore(StoreEvent):
    epoch: str
    message: StoreServerMessage


@dataclass(frozen=True, slots=True)
class StoreClosed(StoreEvent):
    """A session ended.

    Attributes:
        when_quiet: to be called once none of its copies runs; then the next session opens.
    """

    epoch: str
    when_quiet: Callable[[], None]
