"""Order of eviction."""

from array import array
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace

_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1
# Entries are grouped by the upper bits of their last use. Only the oldest group is sorted.
_GROUP_BITS = 8


class EvictionQueue:
    """Slots by the last use of their pages, least recent first.

    A slot has at most one entry. Entries are not updated: one that is out of date is moved or dropped when it comes up.
    So a slot that becomes evictable costs O(1), and a use costs nothing. Later groups are arrays, which the garbage
    collector need not look into.
    """

    def __init__(self, is_queued: bytearray) -> None:
        """
        Args:
            is_queued: whether a slot has an entry, in this queue or in another one that shares the flags.
        """
        self._is_queued = is_queued
        # Heap of last_use << _SLOT_BITS | slot, for uses below _front_end.
        self._front: list[int] = []
        self._front_end = 0
        self._groups: dict[int, array[int]] = {}
        # Heap of the groups' numbers.
        self._order: list[int] = []

    def slots(self) -> Iterator[int]:
        """Iterates over all entries."""
        yield from (entry & _SLOT_MASK for entry in self._front)
        for slots in self._groups.values():
            yield from slots

    def add(self, slot: int, last_use: int) -> None:
        """Queues a slot. An older entry of the slot stands for it as well, since uses only grow."""
        if not self._is_queued[slot]:
            self._is_queued[slot] = True
            self._insert(slot, last_use)

    def pop(self, evictable_use: Callable[[int], int | None]) -> int | None:
        """Returns the evictable slot that was used least recently; None without one.

        Args:
            evictable_use: last use of a slot's page, or None while the page cannot be evicted. Such a slot is dropped,
                and must be added again once it can be.
        """
        while self._front or self._sort_next_group():
            slot = self._front[0] & _SLOT_MASK
            last_use = evictable_use(slot)
            if last_use is None or last_use << _SLOT_BITS | slot == self._front[0]:
                heappop(self._front)
                self._is_queued[slot] = False
                if last_use is not None:
                    return slot
            elif last_use < self._front_end:
                heapreplace(self._front, last_use << _SLOT_BITS | slot)
            else:
                heappop(self._front)
                self._insert(slot, last_use)
        return None

    def _insert(self, slot: int, last_use: int) -> None:
        if last_use < self._front_end:
            heappush(self._front, last_use << _SLOT_BITS | slot)
            return
        group = last_use >> _GROUP_BITS
        if group in self._groups:
            self._groups[group].append(slot)
        else:
            self._groups[group] = array("I", (slot,))
            heappush(self._order, group)

    def _sort_next_group(self) -> bool:
        """Returns False without a group. The uses at the time of queueing serve as well: `pop` looks again."""
        if not self._order:
            return False
        group = heappop(self._order)
        self._front_end = (group + 1) << _GROUP_BITS
        self._front = [group << _GROUP_BITS + _SLOT_BITS | slot for slot in self._groups.pop(group)]
        heapify(self._front)
        return True
