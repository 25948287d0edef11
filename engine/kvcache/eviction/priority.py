from tandem.engine.kvcache.eviction.base import EvictableNode, EvictionPolicy


class LowestPriority(EvictionPolicy):
    """Evicts the page with the lowest priority; ties go to the least recently used."""

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.priority, node.last_access)
