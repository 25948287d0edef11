"""Eviction policies whose keys change without an access."""

from tandem.engine.kvcache.eviction.base import EvictableNode, EvictionPolicy


class UsesPerTime(EvictionPolicy):
    """Evict the node with the fewest uses for its age; the test sets the time.

    Attributes:
        now: at or after the latest access to the tree.
    """

    def __init__(self) -> None:
        self.now = 0

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.num_hits / (1 + max(0, self.now - node.created)),)


class NeverTheSame(EvictionPolicy):
    """Return a different key at every look, alternately larger and smaller."""

    def __init__(self) -> None:
        self._num_looks = 0

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        self._num_looks += 1
        return (self._num_looks * 7919 % 1009,)


class EverLater(EvictionPolicy):
    """Return a larger key at every look: each candidate then sorts behind all others."""

    def __init__(self) -> None:
        self._num_looks = 0

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        self._num_looks += 1
        return (self._num_looks,)
