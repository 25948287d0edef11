"""Which pages hold which tokens, for reuse by later requests.

A tree over whole pages: each node is one page, keyed by the tuple of its page_size token ids under the tokens before
it. Nodes are never split or merged, so a lookup changes nothing but access order.
"""

import heapq
from collections.abc import Iterator, Sequence


class RadixNode:
    """One cached page. The root is a node without a page."""

    __slots__ = ("children", "key", "last_access", "num_locks", "page_id", "parent")

    def __init__(self, key: tuple[int, ...], page_id: int, parent: "RadixNode | None") -> None:
        self.key = key
        self.page_id = page_id
        self.parent = parent
        self.children: dict[tuple[int, ...], RadixNode] = {}
        # Locks on this node or on any below it.
        self.num_locks = 0
        self.last_access = 0


class RadixCache:
    """The tree, its reference-counted locks, and eviction of the least recently used leaves.

    Attributes:
        num_pages: pages in the tree.
        num_locked_pages: those with at least one lock; all others can be evicted, leaves first.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = RadixNode((), -1, None)
        self.num_pages = 0
        self.num_locked_pages = 0
        self._clock = 0
        # (last_access when pushed, tie-breaker, node) of leaves that could be evicted when they were pushed. Entries
        # go stale and are checked when popped, which is cheaper than keeping the heap exact.
        self._evictable: list[tuple[int, int, RadixNode]] = []
        self._num_pushed = 0

    def match(self, token_ids: Sequence[int], max_pages: int) -> RadixNode:
        """Returns the node of the longest cached prefix of whole pages, the root if there is none."""
        self._clock += 1
        node = self.root
        size = self.page_size
        for start in range(0, min(len(token_ids) // size, max_pages) * size, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            child.last_access = self._clock
            node = child
        # Touched leaves move back in eviction order: their old entries are stale now.
        self._push_if_evictable(node)
        return node

    def path_pages(self, node: RadixNode) -> list[int]:
        """Page numbers from the first page to `node`'s."""
        pages = []
        while node.parent is not None:
            pages.append(node.page_id)
            node = node.parent
        pages.reverse()
        return pages

    def lock(self, node: RadixNode) -> None:
        """Keeps `node` and all pages before it from eviction."""
        while node.parent is not None:
            if node.num_locks == 0:
                self.num_locked_pages += 1
            node.num_locks += 1
            node = node.parent

    def unlock(self, node: RadixNode) -> None:
        leaf = node
        while node.parent is not None:
            assert node.num_locks > 0
            node.num_locks -= 1
            if node.num_locks == 0:
                self.num_locked_pages -= 1
            node = node.parent
        self._push_if_evictable(leaf)

    def get_child(self, node: RadixNode, key: tuple[int, ...]) -> RadixNode | None:
        return node.children.get(key)

    def add_child(self, node: RadixNode, key: tuple[int, ...], page_id: int) -> RadixNode:
        """Puts a page into the tree, unlocked."""
        assert len(key) == self.page_size and key not in node.children
        child = RadixNode(key, page_id, node)
        child.last_access = self._clock
        node.children[key] = child
        self.num_pages += 1
        self._push_if_evictable(child)
        return child

    def evict(self, num_pages: int) -> list[int]:
        """Takes up to `num_pages` unlocked pages out of the tree, leaves first; returns their numbers."""
        evicted: list[int] = []
        while len(evicted) < num_pages and self._evictable:
            last_access, _, node = heapq.heappop(self._evictable)
            if not self._is_evictable(node) or node.last_access != last_access:
                continue
            assert node.parent is not None
            parent = node.parent
            del parent.children[node.key]
            node.parent = None
            self.num_pages -= 1
            evicted.append(node.page_id)
            self._push_if_evictable(parent)
        return evicted

    def nodes(self) -> Iterator[RadixNode]:
        """All nodes but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _is_evictable(self, node: RadixNode) -> bool:
        return node.parent is not None and node.num_locks == 0 and not node.children

    def _push_if_evictable(self, node: RadixNode) -> None:
        if self._is_evictable(node):
            self._num_pushed += 1
            heapq.heappush(self._evictable, (node.last_access, self._num_pushed, node))
            if len(self._evictable) > 64 + 4 * self.num_pages:
                self._drop_stale_entries()

    def _drop_stale_entries(self) -> None:
        """Keeps the heap's size in proportion to the tree's, whatever the number of lookups."""
        current = {id(n): (t, i, n) for t, i, n in self._evictable if self._is_evictable(n) and n.last_access == t}
        self._evictable = sorted(current.values())
