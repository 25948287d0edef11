"""The pages in the region: index by key, eviction, quotas."""

from collections import Counter
from collections.abc import Iterable, Iterator

from tandem.page_changes import PageChangeLog
from tandem.pagestore.server.base import StoredPage
from tandem.pagestore.server.eviction_queue import EvictionQueue
from tandem.pagestore.server.key_index import KeyIndex
from tandem.pagestore.server.namespaces import Namespace, Namespaces
from tandem.pagestore.server.slots import PINNED, READY, UNLISTED, SlotTable
from tandem.prefix import owner_of


class PageMemory:
    """Keeps one page per key. A page is named by its slot, which stays its own while the page is written or pinned.

    Evicts only ready, unpinned pages without a child in the region, the least recently used first. A page whose
    namespaces' owner has its full share takes the place of one of the same owner.

    Attributes:
        states, generations: of the slots (slots.py). Read only.
        slot: returns a page's slot by its key; None if the page is absent.
        changes: ready pages added and removed.
        tick: time of uses; raised by `next_tick`.
        num_pinned, num_evictions: pages pinned now; pages evicted so far.
    """

    def __init__(self, num_slots: int, max_namespace_share: float = 1.0) -> None:
        """
        Args:
            max_namespace_share: largest part of the slots for the namespaces of one owner (`owner_of`), above 0.
        """
        self._slots = SlotTable(num_slots)
        self.states = self._slots.states
        self.generations = self._slots.generations
        self._last_uses = self._slots.last_uses
        self._num_pins = self._slots.num_pins
        self._num_children = self._slots.num_children
        # Listed pages: those that their keys lead to. A purge unlists all, an eviction one.
        self._index = KeyIndex()
        # Numbers of listed pages behind absent ones, by the absent page's key.
        self.slot = self._index.get
        self._num_orphans: dict[bytes, int] = {}
        self._is_queued = bytearray(num_slots)
        self._queue = EvictionQueue(self._is_queued)
        self._namespaces = Namespaces(num_slots, max_namespace_share)
        self._has_quotas = self._namespaces.has_quotas
        self.changes = PageChangeLog()
        self.tick = 0
        self.num_pinned = 0
        self.num_evictions = 0

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_free(self) -> int:
        return self._slots.num_free

    def page(self, slot: int) -> StoredPage:
        """Returns the page of a slot in use, with its namespace's owner."""
        key, parent = self._slots.keys(slot)
        return StoredPage(key, parent, self._slots.identity(slot), self._namespaces.of(slot).name)

    def is_listed(self, slot: int) -> bool:
        return self.states[slot] < UNLISTED

    def num_pins(self, slot: int) -> int:
        return self._num_pins[slot]

    def in_use(self) -> Iterator[int]:
        return self._slots.in_use()

    def next_tick(self) -> None:
        self.tick += 1
        self.tidy()

    def tidy(self) -> None:
        """Frees a part of the memory that a purge has left behind."""
        self._index.free_some()

    def use(self, slot: int) -> None:
        self._last_uses[slot] = self.tick

    def allocate(self, page: tuple[bytes, bytes, bytes, str], state: int) -> int | None:
        """Lists a page that is not listed yet, in a free or evicted slot. The page before it is not evicted for it.

        Args:
            page: the fields of StoredPage.
            state: slots.WRITING or READING.

        Returns:
            The slot; None if there is no room.
        """
        key, parent, identity, namespace = page
        owner = owner_of(namespace)
        if parent:
            before = self.slot(parent)
            if before is None:
                self._num_orphans[parent] = self._num_orphans.get(parent, 0) + 1
            else:
                self._num_children[before] += 1
        if (self._has_quotas or not self._slots.num_free) and not self._make_room(owner):
            if parent:
                self._remove_child(parent)
            return None
        slot = self._slots.take(state, key, parent, identity)
        self._last_uses[slot] = self.tick
        self._num_children[slot] = self._num_orphans.pop(key, 0) if self._num_orphans else 0
        self._index.add(key, slot)
        self._namespaces.add_slot(slot, owner)
        return slot

    def make_ready(self, slot: int) -> bool:
        """Makes a page visible. Returns False if it was purged while it was written: its slot is free."""
        if self.states[slot] >= UNLISTED:
            self._free(slot)
            return False
        self.states[slot] = READY
        self.changes.store(self._slots.identity(slot))
        if self._num_children[slot] == 0:
            self._queue_for_eviction(slot)
        return True

    def discard(self, slot: int) -> None:
        """Frees the slot of a page that never became ready."""
        if self.is_listed(slot):
            self._unlist(slot)
        self._free(slot)

    def pin(self, slot: int) -> None:
        """Pins a ready page."""
        if self._num_pins[slot] == 0:
            self.states[slot] = PINNED
            self.num_pinned += 1
        self._num_pins[slot] += 1

    def pin_run(self, keys: Iterable[bytes]) -> list[int]:
        """Pins and uses the ready pages from the first key on, up to the first one that is not. Returns their slots."""
        slots: list[int] = []
        get, states, num_pins = self.slot, self.states, self._num_pins
        for key in keys:
            slot = get(key)
            if slot is None or states[slot] < READY:
                break
            if states[slot] == READY:
                states[slot] = PINNED
                self.num_pinned += 1
            num_pins[slot] += 1
            self._last_uses[slot] = self.tick
            slots.append(slot)
        return slots

    def unpin(self, slots: Iterable[int]) -> None:
        states, num_pins = self.states, self._num_pins
        for slot in slots:
            pins = num_pins[slot] = num_pins[slot] - 1
            if pins:
                continue
            self.num_pinned -= 1
            if states[slot] == PINNED:
                states[slot] = READY
                if self._num_children[slot] == 0:
                    self._queue_for_eviction(slot)
            else:
                self._free(slot)

    def purge(self) -> None:
        """Unlists all pages. Slots in use are freed by their last user."""
        if self.num_free == len(self):
            return
        self.changes.remove_all(self._slots.purge())
        self._index.clear()
        self._num_orphans = {}
        self._is_queued[:] = bytes(len(self))
        self._queue = EvictionQueue(self._is_queued)
        self._namespaces.purge(self.in_use())

    # --- eviction -----------------------------------------------------------------------------------------------

    def _make_room(self, name: str) -> bool:
        if self._namespaces.is_full(name):
            return self._evict(self._namespaces.get(name))
        return self._slots.num_free > 0 or self._evict(None)

    def _evict(self, namespace: Namespace | None) -> bool:
        """Evicts a page, of `namespace` if given."""
        queue = self._queue if namespace is None else namespace.queue
        slot = queue.pop(self._evictable_use)
        if slot is None:
            return False
        if namespace is None and self._has_quotas:
            # It comes first in the queue of its own namespace too.
            self._namespaces.of(slot).queue.pop(self._evictable_use)
        self.num_evictions += 1
        self.changes.remove(self._slots.identity(slot))
        self._unlist(slot)
        self._free(slot)
        return True

    def _evictable_use(self, slot: int) -> int | None:
        if self.states[slot] == READY and self._num_children[slot] == 0:
            return self._last_uses[slot]
        return None

    def _queue_for_eviction(self, slot: int) -> None:
        last_use = self._last_uses[slot]
        self._queue.add(slot, last_use)
        if self._has_quotas:
            self._namespaces.of(slot).queue.add(slot, last_use)

    def _unlist(self, slot: int) -> None:
        key, parent = self._slots.keys(slot)
        self._index.remove(key)
        if self._num_children[slot]:
            self._num_orphans[key] = self._num_children[slot]
        if parent:
            self._remove_child(parent)

    def _free(self, slot: int) -> None:
        self._slots.give_back(slot)
        self._namespaces.remove_slot(slot)

    def _remove_child(self, parent: bytes) -> None:
        slot = self.slot(parent)
        if slot is not None:
            num_children = self._num_children[slot] = self._num_children[slot] - 1
            if num_children == 0 and self.states[slot] == READY:
                self._queue_for_eviction(slot)
        elif self._num_orphans[parent] > 1:
            self._num_orphans[parent] -= 1
        else:
            del self._num_orphans[parent]

    # --- integrity ----------------------------------------------------------------------------------------------

    def check_integrity(self) -> str:
        """Recounts everything from the slots; "" or the first violation. O(slots)."""
        return (
            self._slots.check_integrity()
            or self._namespaces.check_integrity(self.in_use())
            or next(self._violations(), "")
        )

    def _violations(self) -> Iterator[str]:
        listed = {slot: self._slots.keys(slot) for slot in self.in_use() if self.is_listed(slot)}
        if dict(self._index.items()) != {key: slot for slot, (key, _) in listed.items()} or len(self._index) != len(
            listed
        ):
            yield f"{len(self._index)} keys lead to pages, but {len(listed)} pages are listed"
        num_children = Counter(parent for _, parent in listed.values() if parent)
        if any(num_children.pop(key, 0) != self._num_children[slot] for slot, (key, _) in listed.items()):
            yield "children are miscounted"
        if num_children != self._num_orphans:
            yield "children of absent pages are miscounted"
        if sum(pins > 0 for pins in self._num_pins) != self.num_pinned:
            yield f"{self.num_pinned} pages should be pinned"
        queued = Counter(self._queue.slots())
        if queued != Counter(slot for slot, is_queued in enumerate(self._is_queued) if is_queued):
            yield "the queue has lost a slot"
        for slot in listed:
            if self._evictable_use(slot) is not None and not (queued[slot] and self._namespaces.is_queued(slot)):
                yield f"slot {slot} would never be evicted"
