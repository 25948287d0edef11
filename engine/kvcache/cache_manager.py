from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from tandem.engine.kvcache.allocator import PageAllocator
from tandem.engine.kvcache.base import Completion
from tandem.engine.kvcache.deferred_frees import DeferredFree, DeferredFrees
from tandem.engine.kvcache.eviction.table import EVICTION_POLICIES
from tandem.engine.kvcache.page_ceiling import PageCeiling
from tandem.engine.kvcache.page_table import PageTable
from tandem.engine.kvcache.radix_cache import CachedPrefix, RadixCache, RadixNode, TreeWatch
from tandem.page_changes import PageChanges

NO_PREFIX = CachedPrefix(None, 0)


@dataclass(eq=False, slots=True)
class PageHandle:
    """Pages held for one request: the first `num_shared` in the radix tree, locked through `node`, the rest private.

    Attributes:
        table_id: number of the page table, unique in the manager; sequences carry it into every launch.
        page_ids: the manager may replace a duplicate page's id.
        cached_len: tokens found in the tree at acquisition, a multiple of the page size.
        leased: True while another worker writes the private pages.
        is_withheld: whether the private pages are never offered to the page store.
    """

    table_id: int
    page_ids: PageTable
    num_shared: int
    node: RadixNode
    cached_len: int
    priority: int = 0
    leased: bool = False
    ceiling: PageCeiling | None = None
    is_withheld: bool = False


class CacheManager:
    """The only owner of a worker's pages.

    Every page is in exactly one state: free; cached (in the tree, unlocked); locked (in the tree under a lock, private
    to a handle, or waiting to be freed); leased (private to a handle of a lease).

    A page of the tree may also be held while it is copied out. It may be evicted meanwhile, and is freed once it is let
    go. Ancestors need no hold, unlike under a lock, so a copy withholds only the pages that it reads.

    A page is freed only when no operation launched with its id can still run, always through DeferredFrees. Evicted
    pages that are not held need no wait: without locks, no operation uses them.

    Attributes:
        num_attempts: calls that asked for pages.
        num_refusals: calls that got none because too few were available.
    """

    def __init__(
        self, num_pages: int, page_size: int, eviction: str = "lru", max_request_pages: int | None = None
    ) -> None:
        """
        Args:
            eviction: a name in EVICTION_POLICIES, or a policy's import path.
            max_request_pages: pages of the largest request; None: all of the pool.
        """
        self.num_pages = num_pages
        self.max_request_pages = num_pages if max_request_pages is None else max_request_pages
        self.page_size = page_size
        self._allocator = PageAllocator(num_pages)
        self._tree = RadixCache(page_size, EVICTION_POLICIES.load(eviction)())
        self._handles: dict[int, PageHandle] = {}
        # Starts above NO_TABLE.
        self._table_ids = count(1)
        self._deferred = DeferredFrees(self._tree, self._allocator)
        self._ceilings: set[PageCeiling] = set()
        self._num_leased_pages = 0
        # Number of holds by page, and held pages that have been evicted.
        self._holds: dict[int, int] = {}
        self._evicted: set[int] = set()
        self.num_attempts = 0
        self.num_refusals = 0

    @property
    def num_free_pages(self) -> int:
        return self._allocator.num_free

    @property
    def num_cached_pages(self) -> int:
        return self._tree.num_pages - self._tree.num_locked_pages

    @property
    def num_leased_pages(self) -> int:
        return self._num_leased_pages

    @property
    def num_locked_pages(self) -> int:
        return self.num_pages - self.num_free_pages - self.num_cached_pages - self.num_leased_pages

    @property
    def num_namespaces(self) -> int:
        return self._tree.num_namespaces

    @property
    def num_available_pages(self) -> int:
        """Pages free now or after eviction, at least: held pages are taken for evictable ones."""
        return self.num_free_pages + self.num_cached_pages - self.num_held_pages + len(self._evicted)

    @property
    def num_held_pages(self) -> int:
        return len(self._holds)

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def touch(self, token_ids: Sequence[int], namespace: str = "") -> None:
        self._tree.match(namespace, token_ids, len(token_ids))

    def peek(self, token_ids: Sequence[int], namespace: str = "") -> list[int]:
        """Returns the pages of the longest cached prefix; keeps access order."""
        return self._tree.peek(namespace, token_ids, len(token_ids))

    def find_cached(
        self, token_ids: Sequence[int], namespace: str = "", known: CachedPrefix = NO_PREFIX
    ) -> CachedPrefix:
        """Returns the longest cached prefix; keeps access order.

        Args:
            known: an earlier result for these tokens; the search continues there.
        """
        return self._tree.find(namespace, token_ids, known)

    def namespace_of(self, root: RadixNode) -> str:
        """Returns the namespace of a root that has pages."""
        return self._tree.namespace_of(root)

    def watch_tree(self) -> TreeWatch:
        """Begins to note pages that enter the tree and prefixes that are reused."""
        self._tree.watch = TreeWatch(self.num_pages)
        return self._tree.watch

    def withhold_pages(self) -> None:
        """Keeps all present pages, of the tree and of handles, from the page store for good."""
        for node in self._tree.nodes():
            node.is_withheld = True
        for handle in self._handles.values():
            handle.is_withheld = True

    def hold_page(self, node: RadixNode) -> None:
        """Keeps the page of a node in the tree allocated, even if it is evicted, until `let_go_page`."""
        assert not node.is_root and not node.is_evicted
        self._holds[node.page_id] = self._holds.get(node.page_id, 0) + 1

    def let_go_page(self, page_id: int) -> None:
        """Ends a hold, when no copy reads the page."""
        self._holds[page_id] -= 1
        if not self._holds[page_id]:
            del self._holds[page_id]
            if page_id in self._evicted:
                self._evicted.remove(page_id)
                self._allocator.free([page_id])

    def acquire_pages(
        self,
        token_ids: Sequence[int],
        num_tokens: int,
        *,
        max_cached_len: int,
        namespace: str = "",
        priority: int = 0,
        leased: bool = False,
        num_reserved: int = 0,
        ceiling: PageCeiling | None = None,
    ) -> PageHandle | None:
        """Acquires pages for `num_tokens` tokens beginning with `token_ids`, and reuses the cached prefix.

        Matches, locks the path, evicts and allocates, in this order: otherwise the allocation may evict the match.

        Args:
            max_cached_len: upper bound of reused tokens.
            leased: True if another worker will write the private pages.
            num_reserved: free or evictable pages to leave.
            ceiling: limit on the pages of the handle's class.

        Returns:
            None if there are not enough pages; only access order has changed.
        """
        self.num_attempts += 1
        node = self._tree.match(namespace, token_ids, max_cached_len // self.page_size, priority)
        shared = self._tree.path_pages(node)
        root = self._tree.lock_path(node)
        num_private = self.num_pages_for(num_tokens) - len(shared)
        is_over = ceiling is not None and not ceiling.fits(shared, num_private)
        is_short = num_private + num_reserved > self.num_available_pages
        if is_over or is_short:
            self.num_refusals += is_short
            self._tree.unlock_path(node)
            return None
        if self._tree.watch is not None and shared:
            self._tree.watch.matched.append(node)
        handle = PageHandle(
            table_id=next(self._table_ids),
            page_ids=PageTable(shared + self._take(num_private)),
            num_shared=len(shared),
            node=node,
            cached_len=len(shared) * self.page_size,
            priority=priority,
            leased=leased,
            ceiling=ceiling,
        )
        if ceiling is not None:
            self._ceilings.add(ceiling)
            ceiling.hold(handle.page_ids)
        self._tree.keep_root(namespace, root)
        self._handles[handle.table_id] = handle
        if leased:
            self._num_leased_pages += num_private
        return handle

    def acquire_behind(
        self, prefix: CachedPrefix, num_pages: int, namespace: str, priority: int, num_reserved: int
    ) -> PageHandle | None:
        """Acquires private pages that will continue a cached prefix, in a time that does not depend on its length.

        The prefix is not locked, but counts as just accessed.

        Args:
            num_reserved: free or evictable pages to leave.

        Returns:
            None if there are not enough pages.
        """
        if prefix.num_pages and prefix.node is not None:
            self._tree.touch(prefix.node)
        return self.acquire_pages(
            (),
            num_pages * self.page_size,
            max_cached_len=0,
            namespace=namespace,
            priority=priority,
            num_reserved=num_reserved,
        )

    def cache_behind(self, handle: PageHandle, prefix: CachedPrefix, token_ids: Sequence[int]) -> CachedPrefix:
        """Moves the pages of `acquire_behind` into the tree, without locks, and ends the handle.

        Args:
            token_ids: of the prefix and the pages.

        Returns:
            The prefix that the pages end. Without pages, if theirs has been evicted.
        """
        if prefix.is_evicted:
            self.release_pages(handle)
            return NO_PREFIX
        size, num_pages = self.page_size, prefix.num_pages + len(handle.page_ids)
        keys = [tuple(token_ids[i * size : (i + 1) * size]) for i in range(prefix.num_pages, num_pages)]
        # The handle keeps a namespace's root.
        node = prefix.node if prefix.num_pages and prefix.node is not None else handle.node
        node, duplicates = self._tree.add_pages(node, keys, handle.page_ids, handle.priority)
        handle.page_ids = PageTable(duplicates)
        self.release_pages(handle)
        return CachedPrefix(node, num_pages)

    def grow_pages(self, handle: PageHandle, num_tokens: int) -> bool:
        """Adds private pages. Returns False, without changes, if there are not enough."""
        assert handle.table_id in self._handles and not handle.leased and handle.ceiling is None
        missing = self.num_pages_for(num_tokens) - len(handle.page_ids)
        if missing <= 0:
            return True
        self.num_attempts += 1
        if missing > self.num_available_pages:
            self.num_refusals += 1
            return False
        handle.page_ids.extend(self._take(missing))
        return True

    def grow_into_free_pages(self, handle: PageHandle, num_tokens: int, *, num_reserved: int) -> int:
        """Adds private pages for up to `num_tokens` tokens. Evicts nothing.

        Args:
            num_reserved: free or evictable pages to leave.

        Returns:
            The tokens that the handle's pages hold.
        """
        assert handle.table_id in self._handles and not handle.leased and handle.ceiling is None
        missing = self.num_pages_for(num_tokens) - len(handle.page_ids)
        num_pages = min(missing, self.num_free_pages, self.num_available_pages - num_reserved)
        if num_pages > 0:
            handle.page_ids.extend(self._allocator.allocate(num_pages))
        return len(handle.page_ids) * self.page_size

    def commit_lease(self, handle: PageHandle) -> None:
        """Locks a lease's pages after the other worker's last write."""
        assert handle.leased
        self._end_lease(handle)

    def cache_pages(
        self, handle: PageHandle, token_ids: Sequence[int], computed_len: int, after: Sequence[Completion] = ()
    ) -> None:
        """Moves full pages of the first `computed_len` tokens into the tree, locked by the handle.

        If the tree already has such a page, the page table gets it, and the duplicate is freed.

        Args:
            after: operations launched with the handle's page ids.
        """
        assert handle.table_id in self._handles and not handle.leased
        tree, size = self._tree, self.page_size
        node = handle.node
        duplicates: list[int] = []
        originals: list[int] = []
        for i in range(handle.num_shared, computed_len // size):
            key = tuple(token_ids[i * size : (i + 1) * size])
            child = tree.get_child(node, key)
            if child is None:
                child = tree.add_child(node, key, handle.page_ids[i], handle.priority, handle.is_withheld)
            else:
                tree.lock_node(child)
                duplicates.append(handle.page_ids[i])
                originals.append(child.page_id)
                handle.page_ids.replace(i, child.page_id)
            node = child
        handle.node = node
        handle.num_shared = max(handle.num_shared, computed_len // size)
        if duplicates:
            if handle.ceiling is not None:
                handle.ceiling.hold(originals)
            self._deferred.add(DeferredFree(duplicates, None, list(after), handle.ceiling, duplicates))

    def release_pages(self, handle: PageHandle, after: Sequence[Completion] = ()) -> None:
        """Frees the handle's private pages and unlocks those in the tree.

        Args:
            after: operations launched with these page ids; pages stay locked until all have ended.
        """
        del self._handles[handle.table_id]
        if handle.leased:
            self._end_lease(handle)
        private = handle.page_ids[handle.num_shared :]
        self._deferred.add(DeferredFree(private, handle.node, list(after), handle.ceiling, handle.page_ids))

    def free_deferred_pages(self) -> None:
        self._deferred.free_done()

    def drop_cached_pages(self) -> None:
        self._evict(self.num_cached_pages)

    def take_changes(self) -> PageChanges:
        return self._tree.changes.take()

    def check_integrity(self) -> str:
        """Recounts every page's owners; returns the first violation, or ""."""
        owners: dict[int, str] = {}
        for owner, page_ids in self._owners():
            for page_id in page_ids:
                if not 0 <= page_id < self.num_pages:
                    return f"{owner} holds page {page_id}, which does not exist"
                if page_id in owners:
                    return f"page {page_id} belongs to {owners[page_id]} and to {owner}"
                owners[page_id] = owner
        if len(owners) != self.num_pages:
            return f"{self.num_pages - len(owners)} of {self.num_pages} pages have no owner"
        for page_id in self._holds:
            if owners[page_id] not in ("the tree", "a hold on an evicted page"):
                return f"page {page_id} is held, but belongs to {owners[page_id]}"
        if not self._evicted <= self._holds.keys():
            return "an evicted page waits for no hold"
        return self._check_locks()

    def _owners(self) -> Iterator[tuple[str, Iterable[int]]]:
        yield "the free list", self._allocator.free_pages()
        yield "the tree", (node.page_id for node in self._tree.nodes())
        for handle in self._handles.values():
            yield "a handle", handle.page_ids[handle.num_shared :]
        for deferred in self._deferred:
            yield "a deferred free", deferred.page_ids
        yield "a hold on an evicted page", self._evicted

    def _check_locks(self) -> str:
        for handle in self._handles.values():
            if self._tree.path_pages(handle.node) != list(handle.page_ids[: handle.num_shared]):
                return "a handle's shared pages are not those of its path in the tree"
        locked = [h.node for h in self._handles.values()] + [d.node for d in self._deferred if d.node is not None]
        expected: dict[int, int] = {}
        for node in locked:
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
        if self._num_leased_pages != sum(len(h.page_ids) - h.num_shared for h in self._handles.values() if h.leased):
            return "the count of leased pages is wrong"
        return self._check_ceilings()

    def _check_ceilings(self) -> str:
        held: list[tuple[PageCeiling | None, Sequence[int]]] = [(h.ceiling, h.page_ids) for h in self._handles.values()]
        held += [(d.ceiling, d.held) for d in self._deferred]
        expected: dict[PageCeiling, Counter[int]] = {ceiling: Counter() for ceiling in self._ceilings}
        for ceiling, page_ids in held:
            if ceiling is not None:
                expected[ceiling].update(page_ids)
        if any(ceiling.holds() != counts for ceiling, counts in expected.items()):
            return "the pages under a ceiling are counted wrongly"
        return ""

    def _end_lease(self, handle: PageHandle) -> None:
        handle.leased = False
        self._num_leased_pages -= len(handle.page_ids) - handle.num_shared

    def _take(self, num_pages: int) -> list[int]:
        while num_pages > self._allocator.num_free:
            self._evict(num_pages - self._allocator.num_free)
        return self._allocator.allocate(num_pages)

    def _evict(self, num_pages: int) -> None:
        """Evicts pages, and frees those that are not held."""
        evicted = self._tree.evict(num_pages)
        assert evicted or not num_pages
        if self._holds:
            self._evicted.update(page_id for page_id in evicted if page_id in self._holds)
            evicted = [page_id for page_id in evicted if page_id not in self._holds]
        self._allocator.free(evicted)
