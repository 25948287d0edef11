from abc import ABC, abstractmethod
from typing import Protocol


class EvictableNode(Protocol):
    """
    Attributes:
        last_access: time of the last match, or of creation.
        num_hits: number of matches.
        priority: highest priority of its requests.
    """

    created: int
    last_access: int
    num_hits: int
    priority: int


class EvictionPolicy(ABC):
    """Orders the evictable leaves of the radix tree.

    Only leaves compete, because a page is useless without its ancestors. Times are counts of accesses, so the order is
    reproducible. The constructor takes no arguments.
    """

    @abstractmethod
    def key(self, node: EvictableNode) -> tuple[float, ...]:
        """Returns the sort key of a page; the smallest is evicted first.

        A key may change without an access, for example with a clock. A decrease may take effect only after the page's
        next access.

        If all keys change at every look, each eviction examines every leaf, about 2 ms per thousand. Express age by the
        last access instead.
        """
