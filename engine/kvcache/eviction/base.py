"""Which cached page goes first when room is needed."""

from abc import ABC, abstractmethod
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


class EvictionPolicy(ABC):
    """Orders the leaves of the radix tree that nobody holds.

    Only leaves are compared: a page is of use only with all pages before it, so those go last. The times of a node are
    counts of accesses to the tree, so that the order is the same in every run. The policy is made without arguments.
    """

    @abstractmethod
    def key(self, node: EvictableNode) -> tuple[float, ...]:
        """The smallest goes first.

        A key may move without the page being touched, as one that looks at a clock does. One that has become larger
        counts as it is when its turn comes. One that has become smaller may count late: until its page is touched,
        those go first that had smaller keys when they were touched. Whatever keys do, every page that nobody holds can
        be evicted. But where the keys of all pages move at every look, each eviction looks at every leaf, about 2 ms
        for a thousand of them: an age is better said by the time of the last access, which moves only when that does.
        """
