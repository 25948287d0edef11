"""A stream between a worker and the store, with a queue in each direction."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tandem.pagestore.messages import GaveUp, Wrote

if TYPE_CHECKING:
    from tests.fakes.page_store.store import SimStore
    from tests.fakes.page_store.worker import SimWorker

END = "END"


@dataclass(frozen=True)
class SentPurge:
    """A Purge on its way.

    Attributes:
        number: of the Purge.
        reset: number of the last reset that its worker had carried out.
    """

    number: int
    reset: int


@dataclass(eq=False)
class SimSession:
    """Each end notices the session's end when the END in its queue is delivered.

    Attributes:
        up: messages to the store, and END.
        down: messages to the worker, and END.
        epoch: known to the worker after its welcome.
    """

    name: str
    worker: "SimWorker"
    store: "SimStore"
    up: deque[Any] = field(default_factory=deque)
    down: deque[Any] = field(default_factory=deque)
    epoch: str = ""
    open_at_worker: bool = True
    open_at_store: bool = False
    is_cut: bool = False
    _settled: list[Any] = field(default_factory=list)

    def send_up(self, message: Any) -> None:
        self.up.append(message)
        if isinstance(message, Wrote | GaveUp):
            self._settled.append(message)

    def repeat(self, draw: Callable[[int], int]) -> None:
        """Sends an earlier message once more: its generations are over, so it must have no effect."""
        if self._settled and not self.is_cut:
            self.up.append(self._settled[draw(len(self._settled))])

    def cut(self, num_up: int = 0, num_down: int = 0) -> list[Any]:
        """Breaks the stream: of the messages under way only the first arrive. Returns those lost on the way down."""
        if self.is_cut:
            return []
        self.is_cut = True
        while len(self.up) > num_up:
            self.up.pop()
        lost = []
        while len(self.down) > num_down:
            lost.append(self.down.pop())
        self.up.append(END)
        self.down.append(END)
        return lost[::-1]
