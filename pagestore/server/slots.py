"""Slots of the region and the pages in them.

The table has a column per property. An object per slot would do as well, but with a million of them each full garbage
collection takes a second.
"""

from array import array
from collections.abc import Iterator
from struct import Struct

from tandem.pagestore.keys import KEY_BYTES
from tandem.prefix import IDENTITY_BYTES

# States of a slot. A worker writes into it, a slower tier reads into it, or it has a page that nobody or somebody uses.
FREE, WRITING, READING, READY, PINNED = range(5)
STATE_NAMES = ("free", "writing", "reading", "ready", "pinned")
# Added to the state of a slot in use whose page was purged.
UNLISTED = 8

_AFTER_PURGE = bytearray(range(256))
for _state in (WRITING, READING, PINNED):
    _AFTER_PURGE[_state] |= UNLISTED
_AFTER_PURGE[READY] = FREE
_IS_VISIBLE = bytes(state in (READY, PINNED) for state in range(256))
_IS_USED = bytes(state != FREE for state in range(256))

_KEYS = Struct(f"{KEY_BYTES}s{KEY_BYTES}s")
_IDENTITY = Struct(f"{IDENTITY_BYTES}s")
_NO_KEY = bytes(KEY_BYTES)


class SlotTable:
    """Gives each slot one owner at a time.

    Attributes:
        states: FREE, or the state of the page.
        generations: one per page of a slot; they never repeat.
        last_uses: tick of the last message that named the page.
        num_pins: finds that read the slot, and writes of a slower tier from it.
        num_children: listed pages behind this one.
        num_free: number of free slots.
    """

    def __init__(self, num_slots: int) -> None:
        self.states = bytearray(num_slots)
        self.generations = array("Q", bytes(8 * num_slots))
        self.last_uses = array("Q", bytes(8 * num_slots))
        self.num_pins = array("I", bytes(4 * num_slots))
        self.num_children = array("I", bytes(4 * num_slots))
        self.num_free = num_slots
        self._keys = bytearray(_KEYS.size * num_slots)
        self._identities = bytearray(_IDENTITY.size * num_slots)
        # Free slots are those in _returned, and those from _fresh on in state FREE.
        self._returned = array("I")
        self._fresh = 0

    def __len__(self) -> int:
        return len(self.states)

    def take(self, state: int, key: bytes, parent: bytes, identity: bytes) -> int:
        """Raises IndexError if no slot is free."""
        if self._returned:
            slot = self._returned.pop()
        else:
            slot = self.states.find(FREE, self._fresh)
            if slot < 0:
                raise IndexError("no slot is free")
            self._fresh = slot + 1
        self.num_free -= 1
        self.states[slot] = state
        self.generations[slot] += 1
        _KEYS.pack_into(self._keys, slot * _KEYS.size, key, parent)
        _IDENTITY.pack_into(self._identities, slot * _IDENTITY.size, identity)
        return slot

    def give_back(self, slot: int) -> None:
        self.num_free += 1
        self.states[slot] = FREE
        if slot < self._fresh:
            self._returned.append(slot)

    def keys(self, slot: int) -> tuple[bytes, bytes]:
        """Returns the page's key and its parent's, b"" at the beginning of a prompt."""
        key, parent = _KEYS.unpack_from(self._keys, slot * _KEYS.size)
        return key, b"" if parent == _NO_KEY else parent

    def identity(self, slot: int) -> bytes:
        identity: bytes
        (identity,) = _IDENTITY.unpack_from(self._identities, slot * _IDENTITY.size)
        return identity

    def purge(self) -> Iterator[bytes]:
        """Frees unused slots and marks those in use as unlisted. A million slots take a few milliseconds.

        Returns:
            The identities of the pages that were ready, read as far as the caller iterates.
        """
        is_visible, identities = self.states.translate(_IS_VISIBLE), self._identities
        self._identities = bytearray(len(identities))
        self.states[:] = self.states.translate(_AFTER_PURGE)
        self.num_free = self.states.count(FREE)
        del self._returned[:]
        self._fresh = 0
        return (_IDENTITY.unpack_from(identities, slot * _IDENTITY.size)[0] for slot in _find_set(is_visible))

    def in_use(self) -> Iterator[int]:
        """Iterates over the slots that are not free."""
        return _find_set(self.states.translate(_IS_USED))

    def check_integrity(self) -> str:
        """Recounts the free slots; "" or the first violation."""
        fresh = [slot for slot in range(self._fresh, len(self)) if self.states[slot] == FREE]
        free = {*self._returned, *fresh}
        if not len(free) == len(self._returned) + len(fresh) == self.num_free:
            return f"{self.num_free} slots are free, but only {len(free)} different ones"
        for slot, state in enumerate(self.states):
            if (state == FREE) != (slot in free):
                return f"slot {slot} is {'lost' if state == FREE else 'free and used'}"
            if (state & ~UNLISTED == PINNED) != (self.num_pins[slot] > 0):
                return f"slot {slot} is {STATE_NAMES[state & ~UNLISTED]} and has {self.num_pins[slot]} pins"
            if state & UNLISTED and state & ~UNLISTED in (FREE, READY):
                return f"slot {slot} of a purged page has no user"
        return ""


def _find_set(flags: bytearray) -> Iterator[int]:
    index = flags.find(1)
    while index >= 0:
        yield index
        index = flags.find(1, index + 1)
