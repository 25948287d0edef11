"""The pages in the region: index by key, eviction, quotas."""

from collections import Counter
from collections.abc import Iterator

from tandem.pagestore.server.base import StoredPage
from tandem.pagestore.server.changes import PageChangeLog
from tandem.pagestore.server.eviction_queue import EvictionQueue
from tandem.pagestore.server.slots import PageState, SlotPage, SlotTable


class PageMemory:
    """Keeps one page per key.

    Evicts only ready, unpinned pages without a child in the region, the least recently used first. A page whose
    namespace has its full share takes the place of one of its own namespace.

    Attributes:
        changes: ready pages added and removed.
        tick: time of uses; raised by `next_tick`.
        num_pinned, num_evictions: pages pinned now; pages evicted so far.
    """

    def __init__(self, num_slots: int, max_namespace_share: float = 1.0) -> None:
        """
        Args:
            max_namespace_share: largest part of the slots that pages of one namespace may have, above 0.
        """
        self._slots = SlotTable(num_slots)
        self._pages: dict[bytes, SlotPage] = {}
        # Listed pages by the key of the page before them, which may be absent.
        self._num_children: dict[bytes, int] = {}
        self._queue = EvictionQueue()
        self._max_of_namespace = max(int(num_slots * max_namespace_share), 1)
        self._has_quotas = self._max_of_namespace < num_slots
        # Slots by namespace, those of unlisted pages included.
        self._num_of_namespace: dict[str, int] = {}
        self._queues: dict[str, EvictionQueue] = {}
        self.changes = PageChangeLog()
        self.tick = 0
        self.num_pinned = 0
        self.num_evictions = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[SlotPage]:
        """Iterates over all pages that own a slot."""
        return iter(self._slots)

    @property
    def num_free(self) -> int:
        return self._slots.num_free

    @property
    def num_listed(self) -> int:
        return len(self._pages)

    def page(self, key: bytes) -> SlotPage | None:
        return self._pages.get(key)

    def next_tick(self) -> None:
        self.tick += 1

    def use(self, page: SlotPage) -> None:
        page.last_use = self.tick

    def allocate(self, stored: StoredPage, state: PageState) -> SlotPage | None:
        """Lists a page that is not listed yet, in a free or evicted slot. The page before it is not evicted for it."""
        self._add_child(stored.parent)
        if not self._make_room(stored.namespace):
            self._remove_child(stored.parent)
            return None
        page = self._slots.take(stored, state, self.tick)
        self._pages[stored.key] = page
        self._num_of_namespace[stored.namespace] = self._num_of_namespace.get(stored.namespace, 0) + 1
        return page

    def make_ready(self, page: SlotPage) -> bool:
        """Makes a page visible. Returns False if it was purged while it was written: its slot is free."""
        if not page.is_listed:
            self._free(page)
            return False
        page.state = PageState.READY
        self.changes.store(page.stored.identity)
        self._queue_if_evictable(page)
        return True

    def discard(self, page: SlotPage) -> None:
        """Frees the slot of a page that never became ready."""
        if page.is_listed:
            self._unlist(page)
        self._free(page)

    def pin(self, page: SlotPage) -> None:
        self.num_pinned += page.num_pins == 0
        page.num_pins += 1

    def unpin(self, page: SlotPage) -> None:
        page.num_pins -= 1
        if page.num_pins == 0:
            self.num_pinned -= 1
            if page.is_listed:
                self._queue_if_evictable(page)
            else:
                self._free(page)

    def purge(self) -> None:
        """Unlists all pages. Slots in use are freed by their last user."""
        pages = self._pages
        self._pages = {}
        self._num_children = {}
        self._queue.clear()
        self._queues.clear()
        for page in pages.values():
            page.is_listed = False
            if page.state is PageState.READY:
                self.changes.remove(page.stored.identity)
                if page.num_pins == 0:
                    self._free(page)

    # --- eviction -----------------------------------------------------------------------------------------------

    def _make_room(self, namespace: str) -> bool:
        if self._has_quotas and self._num_of_namespace.get(namespace, 0) >= self._max_of_namespace:
            queue = self._queues.get(namespace)
            return queue is not None and self._evict(queue, namespace)
        return self._slots.num_free > 0 or self._evict(self._queue, None)

    def _evict(self, queue: EvictionQueue, namespace: str | None) -> bool:
        def evictable_use(slot: int) -> int | None:
            page = self._slots.page(slot)
            if page is None or not self._is_evictable(page):
                return None
            return page.last_use if namespace in (None, page.stored.namespace) else None

        slot = queue.pop(evictable_use)
        page = None if slot is None else self._slots.page(slot)
        if page is None:
            return False
        self.num_evictions += 1
        self._unlist(page)
        self._free(page)
        return True

    def _is_evictable(self, page: SlotPage) -> bool:
        return (
            page.state is PageState.READY
            and page.num_pins == 0
            and page.is_listed
            and page.stored.key not in self._num_children
        )

    def _queue_if_evictable(self, page: SlotPage) -> None:
        if self._is_evictable(page):
            self._queue.add(page.slot, page.last_use)
            if self._has_quotas:
                namespace = page.stored.namespace
                if namespace not in self._queues:
                    self._queues[namespace] = EvictionQueue()
                self._queues[namespace].add(page.slot, page.last_use)

    def _unlist(self, page: SlotPage) -> None:
        page.is_listed = False
        del self._pages[page.stored.key]
        if page.state is PageState.READY:
            self.changes.remove(page.stored.identity)
        self._remove_child(page.stored.parent)

    def _free(self, page: SlotPage) -> None:
        self._slots.give_back(page)
        namespace = page.stored.namespace
        self._num_of_namespace[namespace] -= 1
        if self._num_of_namespace[namespace] == 0:
            del self._num_of_namespace[namespace]
            self._queues.pop(namespace, None)

    def _add_child(self, parent: bytes) -> None:
        if parent:
            self._num_children[parent] = self._num_children.get(parent, 0) + 1

    def _remove_child(self, parent: bytes) -> None:
        if not parent:
            return
        if self._num_children[parent] > 1:
            self._num_children[parent] -= 1
            return
        del self._num_children[parent]
        page = self._pages.get(parent)
        if page is not None:
            self._queue_if_evictable(page)

    # --- integrity ----------------------------------------------------------------------------------------------

    def check_integrity(self) -> str:
        """Recounts everything from the slots; "" or the first violation. O(slots)."""
        return self._slots.check_integrity() or next(self._violations(), "")

    def _violations(self) -> Iterator[str]:
        pages = list(self._slots)
        listed = [page for page in pages if page.is_listed]
        if {page.stored.key: page for page in listed} != self._pages or len(listed) != len(self._pages):
            yield f"{len(self._pages)} keys lead to pages, but {len(listed)} pages are listed"
        if Counter(page.stored.parent for page in listed if page.stored.parent) != self._num_children:
            yield "children are miscounted"
        if Counter(page.stored.namespace for page in pages) != self._num_of_namespace:
            yield "slots of namespaces are miscounted"
        if self._has_quotas and max(self._num_of_namespace.values(), default=0) > self._max_of_namespace:
            yield f"a namespace has {max(self._num_of_namespace.values())} slots of at most {self._max_of_namespace}"
        if sum(page.num_pins > 0 for page in pages) != self.num_pinned:
            yield f"{self.num_pinned} pages should be pinned"
        for page in pages:
            if not page.is_listed and page.state is PageState.READY and page.num_pins == 0:
                yield f"slot {page.slot} of a removed page has no user"
            if page.num_pins and page.state is not PageState.READY:
                yield f"slot {page.slot} is {page.state.value}, yet pinned"
            if self._is_evictable(page):
                queue = self._queues.get(page.stored.namespace)
                if page.slot not in self._queue or (self._has_quotas and (queue is None or page.slot not in queue)):
                    yield f"slot {page.slot} would never be evicted"
