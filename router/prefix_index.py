"""The router's own idea of which worker has cached which prefix.

Approximate: it remembers what it sent where, and forgets the least recently used. A worker may have evicted a page or
cached one that the index does not know; a wrong guess costs a computation, never a wrong answer.
"""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    def __init__(self, max_entries: int = 200_000) -> None:
        """Args: max_entries: pages remembered, over all workers."""
        self._max_entries = max_entries
        # (worker life, identity of a whole prefix up to a page's end), least recently used first.
        self._known: OrderedDict[tuple[str, int], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def insert(self, worker_life: str, identities: Sequence[int]) -> None:
        """These prefixes, of the same tokens, have been sent to a worker."""
        # The last page first: the leading ones end up as the most recently used.
        for identity in reversed(identities):
            self._known[worker_life, identity] = None
            self._known.move_to_end((worker_life, identity))
        while len(self._known) > self._max_entries:
            self._known.popitem(last=False)

    def num_pages(self, worker_life: str, identities: Sequence[int]) -> int:
        """How many leading pages the worker should have. A page is forgotten no later than those beyond it are, so
        the border between known and unknown can be searched for."""
        low, high = 0, len(identities)
        while low < high:
            middle = (low + high) // 2
            if (worker_life, identities[middle]) in self._known:
                low = middle + 1
            else:
                high = middle
        return low
