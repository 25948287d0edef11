from tandem.engine.kvcache.eviction.base import EvictableNode, EvictionPolicy


class LeastFrequentlyUsed(EvictionPolicy):
    """Evicts the least frequently used page; ties go to the least recently used."""

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.num_hits, node.last_access)
