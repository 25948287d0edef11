"""Writes ready pages to a slower tier in the background."""

from collections import deque
from collections.abc import Iterator

from tandem.pagestore.server.base import EndedTransfer, SlowTier
from tandem.pagestore.server.page_memory import PageMemory
from tandem.pagestore.server.slots import SlotPage


class WriteBehind:
    """Pages go out in the order of their readiness; one evicted before its turn is skipped.

    Attributes:
        num_failed: writes that failed. They are not tried again.
    """

    def __init__(self, memory: PageMemory, tier: SlowTier) -> None:
        self._memory = memory
        self._tier = tier
        self._queue: deque[SlotPage] = deque()
        self._writing: dict[int, SlotPage] = {}
        self.num_failed = 0

    @property
    def num_queued(self) -> int:
        """Pages that wait, some of them evicted."""
        return len(self._queue)

    @property
    def num_writing(self) -> int:
        return len(self._writing)

    def add(self, page: SlotPage) -> None:
        self._queue.append(page)
        # A tier that takes no pages must not grow the queue without bound.
        if len(self._queue) > 2 * len(self._memory):
            self._queue = deque(page for page in self._queue if page.is_listed)

    def start(self) -> None:
        """Starts writes until the tier takes no more."""
        while self._queue:
            page = self._queue[0]
            if page.is_listed and self._tier.find(page.stored.key) is None:
                if not self._tier.write(page.stored, page.slot):
                    return
                self._memory.pin(page)
                self._writing[page.slot] = page
            self._queue.popleft()

    def on_ended_write(self, transfer: EndedTransfer) -> bool:
        """Takes the end of a write. Returns False if the slot is not being written from."""
        page = self._writing.pop(transfer.slot, None)
        if page is None:
            return False
        self.num_failed += not transfer.ok
        self._memory.unpin(page)
        return True

    def pages_being_written(self) -> Iterator[SlotPage]:
        return iter(self._writing.values())
