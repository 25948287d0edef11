"""Radix tree of cached pages.

Each node is one page, keyed by its page_size token ids below its parent. Nodes are never split or merged. Each
namespace has its own tree, and never shares pages.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from tandem.engine.kvcache.eviction.base import EvictionPolicy
from tandem.page_changes import PageChangeLog
from tandem.prefix import namespace_identity, page_identity

# Matched prefixes kept by a TreeWatch; the oldest go first.
MAX_MATCHED = 64


class RadixNode:
    """One cached page. A root has no page and an empty key, and lives as long as it has children or locks.

    Attributes:
        identity: identity of the prefix that the page ends (tandem.prefix).
        num_locks: locks on this node or below it.
        heap_entry: number of its latest entry in the eviction heap; 0 before the first.
        store_key: key in the page store (tandem.pagestore.keys), of a root too; None until it is computed.
        store_hits: requests that reused the page, counted by the store tier if it needs the number.
        store_mark: the store tier's note that it has offered the page to the store; 0: it has not.
        is_withheld: whether the page is never offered to the store, like all its descendants.
    """

    __slots__ = (
        "children",
        "created",
        "heap_entry",
        "identity",
        "is_withheld",
        "key",
        "last_access",
        "num_hits",
        "num_locks",
        "page_id",
        "parent",
        "priority",
        "store_hits",
        "store_key",
        "store_mark",
    )

    def __init__(
        self, key: tuple[int, ...], identity: bytes, page_id: int, parent: "RadixNode | None", created: int
    ) -> None:
        self.key = key
        self.identity = identity
        self.page_id = page_id
        self.parent = parent
        self.children: dict[tuple[int, ...], RadixNode] = {}
        self.num_locks = 0
        self.heap_entry = 0
        self.created = created
        self.last_access = created
        self.num_hits = 0
        self.priority = 0
        self.store_key: bytes | None = None
        self.store_hits = 0
        self.store_mark = 0
        self.is_withheld: bool = parent is not None and parent.is_withheld

    @property
    def is_root(self) -> bool:
        return self.page_id < 0

    @property
    def is_evicted(self) -> bool:
        return self.parent is None and self.page_id >= 0


class TreeWatch:
    """
    Attributes:
        entered: pages that are not withheld, in the order of their entry, parents first. Some may have been evicted
            since.
        matched: last pages of prefixes that requests reused.
    """

    def __init__(self, num_pages: int) -> None:
        # Older pages than a pool's worth have been evicted.
        self.entered: deque[RadixNode] = deque(maxlen=num_pages)
        self.matched: deque[RadixNode] = deque(maxlen=MAX_MATCHED)


class CachedPrefix(NamedTuple):
    """The cached prefix of a prompt.

    Attributes:
        node: its last page, or the namespace's root; None: the namespace has no tree. Valid until it `is_evicted`.
        num_pages: its length.
    """

    node: RadixNode | None
    num_pages: int

    @property
    def is_evicted(self) -> bool:
        return self.num_pages > 0 and self.node is not None and self.node.is_evicted


_Entry: TypeAlias = tuple[tuple[float, ...], int, RadixNode]


class RadixCache:
    """The trees, their reference-counted locks, and eviction from the leaves.

    Attributes:
        num_locked_pages: pages with at least one lock; all others are evictable.
        watch: told of pages that enter the trees; None: nobody.
    """

    def __init__(self, page_size: int, policy: EvictionPolicy) -> None:
        self.page_size = page_size
        self.num_pages = 0
        self.num_locked_pages = 0
        self.changes = PageChangeLog()
        self.watch: TreeWatch | None = None
        self._eviction_key = policy.key
        self._roots: dict[str, RadixNode] = {}
        # Keyed by id() of the roots.
        self._namespaces: dict[int, str] = {}
        self._clock = 0
        # Heap of (key when pushed, entry number, node), with the latest entry of every evictable leaf. Stale entries
        # are dropped when popped, which is cheaper than a search.
        self._heap: list[_Entry] = []
        self._num_entries = 0

    def peek(self, namespace: str, token_ids: Sequence[int], max_pages: int) -> list[int]:
        """Returns the pages of the longest cached prefix; changes nothing."""
        pages: list[int] = []
        node = self._roots.get(namespace)
        size = self.page_size
        for start in range(0, min(len(token_ids) // size, max_pages) * size, size):
            node = node.children.get(tuple(token_ids[start : start + size])) if node else None
            if node is None:
                break
            pages.append(node.page_id)
        return pages

    def find(self, namespace: str, token_ids: Sequence[int], known: CachedPrefix) -> CachedPrefix:
        """Returns the longest cached prefix; changes nothing.

        Args:
            known: a cached prefix of these tokens, found earlier.
        """
        (node, num_pages), size = known, self.page_size
        if not num_pages or known.is_evicted:
            node, num_pages = self._roots.get(namespace), 0
        while node is not None:
            child = node.children.get(tuple(token_ids[num_pages * size : (num_pages + 1) * size]))
            if child is None:
                break
            node, num_pages = child, num_pages + 1
        return CachedPrefix(node, num_pages)

    def namespace_of(self, root: RadixNode) -> str:
        return self._namespaces[id(root)]

    def match(self, namespace: str, token_ids: Sequence[int], max_pages: int, priority: int = 0) -> RadixNode:
        """Returns the node of the longest cached prefix, or a root. Counts as an access to all its pages."""
        self._clock += 1
        clock, size = self._clock, self.page_size
        node = self._roots.get(namespace) or RadixNode((), namespace_identity(namespace), -1, None, clock)
        for start in range(0, min(len(token_ids) // size, max_pages) * size, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            child.last_access = clock
            child.num_hits += 1
            if priority > child.priority:
                child.priority = priority
            node = child
        self._push_if_evictable(node)
        return node

    def touch(self, node: RadixNode) -> None:
        """Counts as an access to the end of a path, whose ancestors are not evicted before it."""
        self._clock += 1
        node.last_access = self._clock

    @property
    def num_namespaces(self) -> int:
        return len(self._roots)

    def path_pages(self, node: RadixNode) -> list[int]:
        pages = []
        while node.parent is not None:
            pages.append(node.page_id)
            node = node.parent
        pages.reverse()
        return pages

    def lock_path(self, node: RadixNode) -> RadixNode:
        """Locks `node` and its ancestors; returns the root."""
        while node.parent is not None:
            if node.num_locks == 0:
                self.num_locked_pages += 1
            node.num_locks += 1
            node = node.parent
        node.num_locks += 1
        return node

    def keep_root(self, namespace: str, root: RadixNode) -> None:
        """Makes the locked `root` the tree of a namespace."""
        self._roots[namespace] = root
        self._namespaces[id(root)] = namespace

    def unlock_path(self, node: RadixNode) -> None:
        leaf = node
        while node.parent is not None:
            assert node.num_locks > 0
            node.num_locks -= 1
            if node.num_locks == 0:
                self.num_locked_pages -= 1
            node = node.parent
        node.num_locks -= 1
        self._push_if_evictable(leaf)
        self._drop_if_empty(node)

    def get_child(self, node: RadixNode, key: tuple[int, ...]) -> RadixNode | None:
        return node.children.get(key)

    def add_child(
        self, node: RadixNode, key: tuple[int, ...], page_id: int, priority: int, is_withheld: bool = False
    ) -> RadixNode:
        """Adds a page with one lock, the new end of the caller's locked path."""
        child = self._add(node, key, page_id, priority, is_withheld)
        child.num_locks = 1
        self.num_locked_pages += 1
        return child

    def add_pages(
        self, node: RadixNode, keys: Sequence[tuple[int, ...]], page_ids: Sequence[int], priority: int
    ) -> tuple[RadixNode, list[int]]:
        """Adds consecutive pages behind `node`, without locks. Returns the last one, and the ids that are not needed
        because the tree has their pages."""
        duplicates = []
        for key, page_id in zip(keys, page_ids, strict=True):
            child = node.children.get(key)
            if child is None:
                child = self._add(node, key, page_id, priority, is_withheld=False)
            else:
                duplicates.append(page_id)
            node = child
        self._push_if_evictable(node)
        return node, duplicates

    def lock_node(self, node: RadixNode) -> None:
        """Locks only `node`; the caller has locked its parent's path."""
        if node.num_locks == 0:
            self.num_locked_pages += 1
        node.num_locks += 1

    def evict(self, num_pages: int) -> list[int]:
        """Removes up to `num_pages` unlocked pages, leaves first. Returns fewer only if fewer are unlocked."""
        evicted: list[int] = []
        last_entry_before = self._num_entries
        entry = self._pop_entry()
        while entry is not None and len(evicted) < num_pages:
            key, number, node = entry
            if not self._is_current(number, node):
                entry = self._pop_entry()
                continue
            # The key changed without an access: push again. Entries pushed during this eviction count, or an
            # ever-changing key would never be evicted.
            if number <= last_entry_before and self._eviction_key(node) != key:
                self._push_if_evictable(node)
                entry = self._pop_entry()
                continue
            assert node.parent is not None
            parent = node.parent
            del parent.children[node.key]
            node.parent = None
            self.num_pages -= 1
            self.changes.remove(node.identity)
            evicted.append(node.page_id)
            if self._is_evictable(parent):
                # Mostly the next one.
                entry = heapq.heappushpop(self._heap, self._new_entry(parent))
            else:
                entry = self._pop_entry()
                if parent.parent is None:
                    self._drop_if_empty(parent)
        if entry is not None:
            heapq.heappush(self._heap, entry)
        return evicted

    def nodes(self) -> Iterator[RadixNode]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _add(self, node: RadixNode, key: tuple[int, ...], page_id: int, priority: int, is_withheld: bool) -> RadixNode:
        assert len(key) == self.page_size and key not in node.children
        child = RadixNode(key, page_identity(node.identity, key), page_id, node, self._clock)
        child.priority = priority
        child.is_withheld |= is_withheld
        node.children[key] = child
        self.num_pages += 1
        self.changes.store(child.identity)
        if self.watch is not None and not child.is_withheld:
            self.watch.entered.append(child)
        return child

    def _drop_if_empty(self, node: RadixNode) -> None:
        """Clients choose namespace names, so empty ones must go."""
        if node.parent is None and not node.children and not node.num_locks and id(node) in self._namespaces:
            del self._roots[self._namespaces.pop(id(node))]

    def _is_evictable(self, node: RadixNode) -> bool:
        return node.parent is not None and node.num_locks == 0 and not node.children

    def _is_current(self, number: int, node: RadixNode) -> bool:
        return number == node.heap_entry and self._is_evictable(node)

    def _push_if_evictable(self, node: RadixNode) -> None:
        if self._is_evictable(node):
            heapq.heappush(self._heap, self._new_entry(node))
            if len(self._heap) > 64 + 4 * self.num_pages:
                self._renew_heap()

    def _new_entry(self, node: RadixNode) -> _Entry:
        self._num_entries += 1
        node.heap_entry = self._num_entries
        return self._eviction_key(node), self._num_entries, node

    def _pop_entry(self) -> _Entry | None:
        return heapq.heappop(self._heap) if self._heap else None

    def _renew_heap(self) -> None:
        """Keeps the heap proportional to the trees, and recomputes keys, so that decreased ones move forward."""
        current = [(number, node) for _, number, node in self._heap if self._is_current(number, node)]
        self._heap = sorted((self._eviction_key(node), number, node) for number, node in current)
