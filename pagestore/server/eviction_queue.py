"""Order of eviction."""

from collections.abc import Callable
from heapq import heappop, heappush, heapreplace

_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1


class EvictionQueue:
    """Slots by the last use of their pages, least recent first.

    A slot has at most one entry. Entries are not updated: one that is out of date is moved or dropped when it comes up.
    So a slot that becomes evictable costs O(log n), and a use costs nothing.
    """

    def __init__(self) -> None:
        # last_use << _SLOT_BITS | slot: a fourth of the memory of a pair.
        self._heap: list[int] = []
        self._queued: set[int] = set()

    def __contains__(self, slot: int) -> bool:
        return slot in self._queued

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, slot: int, last_use: int) -> None:
        """Queues a slot. An older entry of the slot stands for it as well, since uses only grow."""
        if slot not in self._queued:
            self._queued.add(slot)
            heappush(self._heap, last_use << _SLOT_BITS | slot)

    def pop(self, evictable_use: Callable[[int], int | None]) -> int | None:
        """Returns the evictable slot that was used least recently; None without one.

        Args:
            evictable_use: last use of a slot's page, or None while the page cannot be evicted. Such a slot is dropped,
                and must be added again once it can be.
        """
        while self._heap:
            slot = self._heap[0] & _SLOT_MASK
            last_use = evictable_use(slot)
            if last_use is None or last_use << _SLOT_BITS | slot == self._heap[0]:
                heappop(self._heap)
                self._queued.remove(slot)
                if last_use is not None:
                    return slot
            else:
                heapreplace(self._heap, last_use << _SLOT_BITS | slot)
        return None

    def clear(self) -> None:
        self._heap.clear()
        self._queued.clear()
