from tandem.engine.kvcache.eviction.base import EvictableNode, EvictionPolicy


class FirstInFirstOut(EvictionPolicy):
    """Evicts the page cached first, regardless of use."""

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.created,)
