"""Keys of cached pages, hashed once and kept in the tree's nodes."""

from collections.abc import Sequence

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.kvcache.radix_cache import RadixNode
from tandem.messages import PageFormat
from tandem.pagestore.keys import page_key, page_keys, root_key
from tandem.prefix import split_namespace

# Pages hashed in a turn of the engine thread at least, at 1.5 us each.
HASHES_PER_TURN = 128


class NodeKeys:
    def __init__(self, cache: CacheManager, page_format: PageFormat) -> None:
        self._cache = cache
        self._page_format = page_format
        self._num_left = HASHES_PER_TURN

    def begin_turn(self, num_pages: int = 0) -> None:
        """Args: num_pages: that a long turn may hash."""
        self._num_left = max(HASHES_PER_TURN, num_pages)

    @property
    def num_left(self) -> int:
        """Pages that may still be hashed in this turn."""
        return self._num_left

    def root(self, namespace: str) -> bytes:
        return root_key(self._page_format, *split_namespace(namespace))

    def of(self, node: RadixNode) -> bytes | None:
        """Returns the key of a node in the tree, or of a root that has pages; None if this turn may hash no more: later
        calls go on from there."""
        unhashed = []
        while node.store_key is None and not node.is_root:
            unhashed.append(node)
            assert node.parent is not None
            node = node.parent
        if node.store_key is None:
            node.store_key = self.root(self._cache.namespace_of(node))
        key = node.store_key
        for child in reversed(unhashed):
            if not self._num_left:
                return None
            self._num_left -= 1
            key = child.store_key = page_key(key, child.key)
        return key

    def extend(self, keys: list[bytes], before: bytes, token_ids: Sequence[int], first: int, end: int) -> bool:
        """Appends keys of a prompt's pages until `keys` has those from `first` to `end`. Returns False if this turn may
        hash no more.

        Args:
            before: key of the page before the first.
        """
        size, begin = self._cache.page_size, first + len(keys)
        num_pages = max(0, min(end - begin, self._num_left))
        self._num_left -= num_pages
        pages = token_ids[begin * size : (begin + num_pages) * size]
        keys += page_keys(keys[-1] if keys else before, pages, size)
        return begin + num_pages >= end
