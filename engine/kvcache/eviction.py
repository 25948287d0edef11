"""Which cached page goes first when room is needed.

A policy is a sort key over the leaves of the radix tree: the smallest goes first. Times are counts of accesses to the
tree, so that order is the same in every run.
"""

from collections.abc import Callable
from typing import Protocol


class EvictableNode(Protocol):
    """What a policy may look at.

    Attributes:
        created: when the page came into the tree.
        last_access: when it was last matched, or created.
        num_hits: how often it was matched.
        priority: the highest priority of the requests that used it.
    """

    created: int
    last_access: int
    num_hits: int
    priority: int


EvictionKey = Callable[[EvictableNode], tuple[int, ...]]

EVICTION_POLICIES: dict[str, EvictionKey] = {
    "lru": lambda node: (node.last_access,),
    "lfu": lambda node: (node.num_hits, node.last_access),
    "fifo": lambda node: (node.created,),
    "mru": lambda node: (-node.last_access,),
    "priority": lambda node: (node.priority, node.last_access),
}
