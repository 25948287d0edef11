"""The one owner of a worker's pages: allocates, shares, evicts and frees. Everyone else holds a handle."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.engine.kvcache.allocator import PageAllocator
from tandem.engine.kvcache.radix_cache import RadixCache, RadixNode


class Completion(Protocol):
    """Something launched with page numbers in hand; see PageHandle's release."""

    def done(self) -> bool: ...


@dataclass(eq=False, slots=True)
class PageHandle:
    """Pages held for one request. The first `num_shared` belong to the radix tree and are locked there through `node`;
    the rest are private to the handle.

    Attributes:
        page_ids: the request's page table; the manager may replace a number when it finds a duplicate.
        cached_len: tokens found in the tree when the pages were acquired, a multiple of the page size.
        leased: whether the private pages are a lease, still written by another worker.
    """

    page_ids: list[int]
    num_shared: int
    node: RadixNode
    cached_len: int
    leased: bool = False


@dataclass(slots=True)
class _Retired:
    """A released handle at the gate: operations launched with its page numbers may still run."""

    handle: PageHandle
    pending: list[Completion]


class CacheManager:
    """Page bookkeeping of one worker, in Python integers only.

    Every page is in exactly one state: free; cached (in the tree, unlocked); locked (in the tree under a lock, private
    to a handle, or at the gate); leased (private to a handle of a lease).
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._allocator = PageAllocator(num_pages)
        self._tree = RadixCache(page_size)
        # Handles given out, in order; a dict because sets have no order and order must not depend on addresses.
        self._handles: dict[int, PageHandle] = {}
        self._retired: list[_Retired] = []

    @property
    def num_free_pages(self) -> int:
        return self._allocator.num_free

    @property
    def num_cached_pages(self) -> int:
        return self._tree.num_pages - self._tree.num_locked_pages

    @property
    def num_leased_pages(self) -> int:
        return sum(len(h.page_ids) - h.num_shared for h in self._handles.values() if h.leased)

    @property
    def num_locked_pages(self) -> int:
        return self.num_pages - self.num_free_pages - self.num_cached_pages - self.num_leased_pages

    @property
    def num_available_pages(self) -> int:
        """Pages that an acquisition could get: free now, or after eviction."""
        return self.num_free_pages + self.num_cached_pages

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def touch(self, token_ids: Sequence[int]) -> None:
        """Makes the cached prefix of `token_ids` recently used, so that it is evicted late."""
        self._tree.match(token_ids, len(token_ids))

    def acquire(
        self,
        token_ids: Sequence[int],
        num_tokens: int,
        *,
        max_cached_len: int,
        leased: bool = False,
        num_reserved: int = 0,
    ) -> PageHandle | None:
        """Holds pages for `num_tokens` tokens that begin with `token_ids`, reusing the cached prefix.

        One act: match, lock the path, evict, allocate. In any other order the allocation may evict the match.

        Args:
            max_cached_len: reuse at most this many tokens.
            leased: the private pages will be written by another worker.
            num_reserved: free or evictable pages that must be left over.

        Returns:
            None if there are not enough pages; nothing has changed then but access order.
        """
        node = self._tree.match(token_ids, max_cached_len // self.page_size)
        shared = self._tree.path_pages(node)
        self._tree.lock(node)
        num_private = self.num_pages_for(num_tokens) - len(shared)
        if num_private + num_reserved > self.num_available_pages:
            self._tree.unlock(node)
            return None
        handle = PageHandle(
            page_ids=shared + self._take(num_private),
            num_shared=len(shared),
            node=node,
            cached_len=len(shared) * self.page_size,
            leased=leased,
        )
        self._handles[id(handle)] = handle
        return handle

    def grow(self, handle: PageHandle, num_tokens: int) -> bool:
        """Adds private pages until `handle` holds `num_tokens` tokens; returns False, unchanged, if there are none."""
        assert id(handle) in self._handles
        missing = self.num_pages_for(num_tokens) - len(handle.page_ids)
        if missing <= 0:
            return True
        if missing > self.num_available_pages:
            return False
        handle.page_ids.extend(self._take(missing))
        return True

    def commit_lease(self, handle: PageHandle) -> None:
        """The other worker has written its last byte: the leased pages are locked ones from now on."""
        assert handle.leased
        handle.leased = False

    def insert(self, handle: PageHandle, token_ids: Sequence[int], computed_len: int) -> None:
        """Puts the handle's full pages among the first `computed_len` tokens into the tree, locked by the handle.

        A page whose tokens are in the tree already is a duplicate: the page table is remapped to the tree's page
        first, then the duplicate goes through the gate.
        """
        assert id(handle) in self._handles and not handle.leased
        tree, size = self._tree, self.page_size
        node = handle.node
        duplicates = []
        for i in range(handle.num_shared, computed_len // size):
            key = tuple(token_ids[i * size : (i + 1) * size])
            child = tree.get_child(node, key)
            if child is None:
                child = tree.add_child(node, key, handle.page_ids[i])
            else:
                duplicates.append(handle.page_ids[i])
                handle.page_ids[i] = child.page_id
            node = child
        if node is handle.node:
            return
        tree.lock(node)
        tree.unlock(handle.node)
        handle.node = node
        handle.num_shared = computed_len // size
        if duplicates:
            self._retire(PageHandle(duplicates, 0, tree.root, 0), [])

    def release(self, handle: PageHandle, after: Sequence[Completion] = ()) -> None:
        """Gives all of a handle's pages back, the private ones to be freed, through the gate.

        Args:
            after: operations launched with these page numbers. Until all are done the pages count as locked.
        """
        del self._handles[id(handle)]
        handle.leased = False
        self._retire(handle, list(after))

    def poll(self) -> None:
        """Opens the gate for handles whose operations have completed."""
        if self._retired:
            waiting, self._retired = self._retired, []
            for retired in waiting:
                self._retire(retired.handle, retired.pending)

    def is_quiet(self) -> bool:
        """Whether nothing is held and nothing waits at the gate."""
        return not self._handles and not self._retired

    def check_integrity(self) -> str:
        """Counts every page's owners afresh; returns a description of the first violation, or ""."""
        owners: dict[int, str] = {}

        def claim(page_id: int, owner: str) -> str:
            if not 0 <= page_id < self.num_pages:
                return f"{owner} holds page {page_id}, which does not exist"
            if page_id in owners:
                return f"page {page_id} belongs to {owners[page_id]} and to {owner}"
            owners[page_id] = owner
            return ""

        claims = [(p, "the free list") for p in self._allocator.free_pages()]
        claims += [(node.page_id, "the tree") for node in self._tree.nodes()]
        holders = [*self._handles.values(), *(r.handle for r in self._retired)]
        for handle in holders:
            claims += [(p, "a handle") for p in handle.page_ids[handle.num_shared :]]
        for page_id, owner in claims:
            if violation := claim(page_id, owner):
                return violation
        if len(owners) != self.num_pages:
            return f"{self.num_pages - len(owners)} of {self.num_pages} pages have no owner"
        return self._check_locks(holders)

    def _check_locks(self, holders: Sequence[PageHandle]) -> str:
        expected: dict[int, int] = {}
        for handle in holders:
            if self._tree.path_pages(handle.node) != handle.page_ids[: handle.num_shared]:
                return "a handle's shared pages are not those of its path in the tree"
            node = handle.node
            while node.parent is not None:
                expected[id(node)] = expected.get(id(node), 0) + 1
                node = node.parent
        num_nodes = num_locked = 0
        for node in self._tree.nodes():
            num_nodes += 1
            num_locked += node.num_locks > 0
            if node.num_locks != expected.get(id(node), 0):
                return f"page {node.page_id} counts {node.num_locks} locks, {expected.get(id(node), 0)} are held"
        if (num_nodes, num_locked) != (self._tree.num_pages, self._tree.num_locked_pages):
            return "the tree's page counts are wrong"
        return ""

    def _take(self, num_pages: int) -> list[int]:
        if num_pages > self._allocator.num_free:
            self._allocator.free(self._tree.evict(num_pages - self._allocator.num_free))
        return self._allocator.allocate(num_pages)

    def _retire(self, handle: PageHandle, pending: list[Completion]) -> None:
        pending = [c for c in pending if not c.done()]
        if pending:
            self._retired.append(_Retired(handle, pending))
            return
        self._tree.unlock(handle.node)
        self._allocator.free(handle.page_ids[handle.num_shared :])
