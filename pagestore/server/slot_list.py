"""Slots in an order of their own."""

from array import array
from collections.abc import Iterator


class SlotList:
    """Slots in the order in which they were added last, each once. Two integers a slot, whatever is added."""

    def __init__(self, num_slots: int) -> None:
        # A ring of slots, closed by the number behind the last slot. Meaningful for slots in it only.
        self._next = array("I", bytes(4 * (num_slots + 1)))
        self._before = array("I", bytes(4 * (num_slots + 1)))
        self._is_in = bytearray(num_slots)
        self._end = num_slots
        self._len = 0
        self.clear()

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        slot = self._next[self._end]
        while slot != self._end:
            yield slot
            slot = self._next[slot]

    @property
    def first(self) -> int:
        """Raises IndexError if the list is empty."""
        if not self._len:
            raise IndexError("an empty list of slots")
        return self._next[self._end]

    def add(self, slot: int) -> None:
        """Adds a slot at the end, or moves it there."""
        if self._is_in[slot]:
            self.remove(slot)
        last = self._before[self._end]
        self._next[last] = self._before[self._end] = slot
        self._before[slot], self._next[slot] = last, self._end
        self._is_in[slot] = True
        self._len += 1

    def remove(self, slot: int) -> None:
        """Removes a slot of the list."""
        before, behind = self._before[slot], self._next[slot]
        self._next[before], self._before[behind] = behind, before
        self._is_in[slot] = False
        self._len -= 1

    def clear(self) -> None:
        self._next[self._end] = self._before[self._end] = self._end
        self._is_in[:] = bytes(len(self._is_in))
        self._len = 0
