from tandem.engine.kvcache.eviction.base import EvictableNode, EvictionPolicy


class LeastRecentlyUsed(EvictionPolicy):
    """Evicts the least recently used page."""

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.last_access,)


class MostRecentlyUsed(EvictionPolicy):
    """Evicts the most recently used page, for prompts that recur in turn and exceed the cache."""

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (-node.last_access,)
