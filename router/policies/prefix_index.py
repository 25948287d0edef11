"""The router's own idea of which worker has cached which prefix.

It is approximate: it remembers what was sent where, and forgets the least recently used. A worker may have evicted a
page or cached one that the index does not know; a wrong guess costs a computation, never a wrong answer.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence


class PrefixIndex:
    def __init__(self, max_entries: int = 200_000) -> None:
        """Args: max_entries: pages remembered, over all workers."""
        self._max_entries = max_entries
        # The keys are pairs of a worker's incarnation and the identity of a whole prefix up to a page's end. They stand
        # in the order of use, the least recently used first.
        self._by_use: OrderedDict[tuple[str, int], None] = OrderedDict()
        # The same by worker: this is asked for every worker at every choice.
        self._known: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return len(self._by_use)

    def record_sent(self, incarnation: str, identities: Sequence[int]) -> None:
        """Remembers that these prefixes, of the same tokens, are at a worker from now on."""
        self._known.setdefault(incarnation, set()).update(identities)
        # The last page is first: so the leading ones end up as the most recently used.
        for identity in reversed(identities):
            self._by_use[incarnation, identity] = None
            self._by_use.move_to_end((incarnation, identity))
        while len(self._by_use) > self._max_entries:
            (oldest, identity), _ = self._by_use.popitem(last=False)
            known = self._known[oldest]
            known.discard(identity)
            if not known:
                del self._known[oldest]

    def known_pages(self, identities: Sequence[int]) -> Callable[[str], int]:
        """Returns a function that says of a worker, by its incarnation, how many leading pages it should have.

        No page is forgotten before those beyond it, so the border between known and unknown can be searched for. Of
        many workers most know the same of a prompt, a beginning that all prompts share or nothing: so where the border
        was for the last worker is looked at first.
        """
        num_pages = len(identities)
        nothing: frozenset[int] = frozenset()
        last = 0

        def count(incarnation: str) -> int:
            nonlocal last
            known = self._known.get(incarnation, nothing)
            if last and identities[last - 1] not in known:
                low, high = 0, last - 1
            elif last < num_pages and identities[last] in known:
                low, high = last + 1, num_pages
            else:
                return last
            while low < high:
                middle = (low + high) // 2
                if identities[middle] in known:
                    low = middle + 1
                else:
                    high = middle
            last = low
            return low

        return count
