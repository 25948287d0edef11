"""Eviction policies whose keys move without a page being touched."""

from tandem.engine.kvcache.eviction.base import EvictableNode, EvictionPolicy


class UsesPerTime(EvictionPolicy):
    """What was used least often for its age goes first. Time is a number that a test moves on.

    Attributes:
        now: not before the latest access to the tree.
    """

    def __init__(self) -> None:
        self.now = 0

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.num_hits / (1 + max(0, self.now - node.created)),)


class NeverTheSame(EvictionPolicy):
    """A key that is another one at every look, now larger and now smaller."""

    def __init__(self) -> None:
        self._num_looks = 0

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        self._num_looks += 1
        return (self._num_looks * 7919 % 1009,)


class EverLater(EvictionPolicy):
    """A key that is larger at every look: whatever comes up would belong behind all others."""

    def __init__(self) -> None:
        self._num_looks = 0

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        self._num_looks += 1
        return (self._num_looks,)
