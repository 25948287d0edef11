"""Eviction by who used a page."""

from tandem.engine.kvcache.eviction.base import EvictableNode, EvictionPolicy


class LowestPriority(EvictionPolicy):
    """What only requests of low priority used goes first; of equals, what was not used for longest."""

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.priority, node.last_access)
