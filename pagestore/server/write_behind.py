"""Writes ready pages to a slower tier in the background."""

from collections.abc import Iterator

from tandem.pagestore.server.base import EndedTransfer, SlowTier
from tandem.pagestore.server.page_memory import PageMemory
from tandem.pagestore.server.slot_list import SlotList
from tandem.pagestore.server.slots import PINNED, READY

# Queued pages that one call of `start` looks at: most may be evicted by the time that a slow tier goes on.
MAX_STARTED = 1024


class WriteBehind:
    """Pages go out in the order of their readiness; one evicted before its turn is skipped.

    Attributes:
        num_failed: writes that failed. They are not tried again.
    """

    def __init__(self, memory: PageMemory, tier: SlowTier) -> None:
        self._memory = memory
        self._tier = tier
        self._queue = SlotList(len(memory))
        self._writing: set[int] = set()
        self.num_failed = 0

    @property
    def num_queued(self) -> int:
        """Pages that wait, some of them evicted."""
        return len(self._queue)

    @property
    def num_writing(self) -> int:
        return len(self._writing)

    def add(self, slot: int) -> None:
        """Queues a page that became ready. It has no place in the queue but its slot's, whose earlier page is gone."""
        self._queue.add(slot)

    def start(self) -> None:
        """Starts writes until the tier takes no more."""
        for _ in range(min(len(self._queue), MAX_STARTED)):
            slot = self._queue.first
            if self._memory.states[slot] in (READY, PINNED):
                page = self._memory.page(slot)
                if self._tier.find(page.key) is None:
                    if not self._tier.write(page, slot):
                        return
                    self._memory.pin(slot)
                    self._writing.add(slot)
            self._queue.remove(slot)

    def on_ended_write(self, transfer: EndedTransfer) -> bool:
        """Takes the end of a write. Returns False if the slot is not being written from."""
        if transfer.slot not in self._writing:
            return False
        self._writing.remove(transfer.slot)
        self.num_failed += not transfer.ok
        self._memory.unpin((transfer.slot,))
        return True

    def on_purge(self) -> None:
        """Forgets the queue. Writes in flight keep their slots until they end."""
        self._queue.clear()

    def slots_being_written(self) -> Iterator[int]:
        return iter(self._writing)
