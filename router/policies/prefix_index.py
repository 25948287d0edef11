"""The router's own idea of which worker has cached which prefix.

It is approximate: it remembers what was sent where, and forgets the least recently used. A worker may have evicted a
page or cached one that the index does not know; a wrong guess costs a computation, never a wrong answer.
"""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    def __init__(self, max_entries: int = 200_000) -> None:
        """Args: max_entries: pages remembered, over all workers."""
        self._max_entries = max_entries
        # The keys are pairs of a worker's incarnation and the identity of a whole prefix up to a page's end. They stand
        # in the order of use, the least recently used first.
        self._known: OrderedDict[tuple[str, int], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def record_sent(self, incarnation: str, identities: Sequence[int]) -> None:
        """Remembers that these prefixes, of the same tokens, are at a worker from now on."""
        # The last page is first: so the leading ones end up as the most recently used.
        for identity in reversed(identities):
            self._known[incarnation, identity] = None
            self._known.move_to_end((incarnation, identity))
        while len(self._known) > self._max_entries:
            self._known.popitem(last=False)

    def count_known_pages(self, incarnation: str, identities: Sequence[int]) -> int:
        """Returns how many leading pages the worker should have."""
        # No page is forgotten before those beyond it, so the border between known and unknown can be searched for.
        low, high = 0, len(identities)
        while low < high:
            middle = (low + high) // 2
            if (incarnation, identities[middle]) in self._known:
                low = middle + 1
            else:
                high = middle
        return low
