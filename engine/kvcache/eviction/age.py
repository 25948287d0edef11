"""Eviction by how long a page has been cached."""

from tandem.engine.kvcache.eviction.base import EvictableNode, EvictionPolicy


class FirstInFirstOut(EvictionPolicy):
    """What was cached first goes first, however often it is used."""

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (node.created,)
