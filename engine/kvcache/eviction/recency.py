"""Eviction by when a page was last used."""

from tandem.engine.kvcache.eviction.base import EvictableNode, EvictionPolicy


class LeastRecentlyUsed(EvictionPolicy):
    """What was not used for longest goes first."""

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.last_access,)


class MostRecentlyUsed(EvictionPolicy):
    """What was used last goes first: for prompts that come in turn and are more than the cache holds."""

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (-node.last_access,)
