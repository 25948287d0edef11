"""Interface of eviction policies."""

from abc import ABC, abstractmethod
from typing import Protocol


class EvictableNode(Protocol):
    """Attributes of a page that a policy may use.

    Attributes:
        created: time the page entered the tree.
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

    Only leaves compete, because a page is useless without its ancestors. Times are counts of accesses to the tree, so
    the order is reproducible. The constructor takes no arguments.
    """

    @abstractmethod
    def key(self, node: EvictableNode) -> tuple[float, ...]:
        """Returns the sort key of a page; the smallest is evicted first.

        A key may change without an access, for example with a clock. An increased key takes effect when its page is
        next considered. A decreased key may take effect late: until an access, pages with smaller recorded keys go
        first. Every unlocked page can be evicted in any case.

        If all keys change at every look, each eviction examines every leaf, about 2 ms per thousand. Express age by the
        last access, which changes only with an access.
        """
