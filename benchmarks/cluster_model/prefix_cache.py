"""Which prefixes a modelled worker has cached."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class PrefixCache:
    """Pages by their identities; those that were not used for longest go first, the last pages of a prefix before the
    first ones."""

    def __init__(self, num_pages: int, tell: Callable[[Sequence[int], Sequence[int]], None]) -> None:
        """Args: tell: called with what has come and what has gone."""
        self._num_pages = num_pages
        self._tell = tell
        self._pages: OrderedDict[int, None] = OrderedDict()

    def num_cached(self, identities: Iterable[int]) -> int:
        """Leading pages that are here."""
        count = 0
        for identity in identities:
            if identity not in self._pages:
                break
            count += 1
        return count

    def use(self, identities: Sequence[int]) -> None:
        """These are here from now on."""
        pages = self._pages
        stored = [identity for identity in identities if identity not in pages]
        for identity in reversed(identities):
            pages[identity] = None
            pages.move_to_end(identity)
        num_too_many = len(pages) - self._num_pages
        removed = [pages.popitem(last=False)[0] for _ in range(num_too_many)]
        if stored or removed:
            self._tell(stored, removed)
