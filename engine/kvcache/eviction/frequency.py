"""Eviction by how often a page was used."""

from tandem.engine.kvcache.eviction.base import EvictableNode, EvictionPolicy


class LeastFrequentlyUsed(EvictionPolicy):
    """What was used least often goes first; of equals, what was not used for longest."""

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.num_hits, node.last_access)
