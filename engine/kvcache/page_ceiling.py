"""A bound on the pages that one class of holders has together."""

from collections import Counter
from collections.abc import Sequence


class PageCeiling:
    """However many handles of a class there are, together they get at most so many pages: the rest of the pool is there
    for everybody else. A page that several of them share counts once, and it counts until nothing runs with its number.

    `CacheManager` keeps the count; a pool whose holders are all of one class has none.
    """

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages
        # For each page how many of the class have it.
        self._holds: Counter[int] = Counter()

    @property
    def num_pages(self) -> int:
        """Pages that the class has now."""
        return len(self._holds)

    def fits(self, shared: Sequence[int], num_private: int) -> bool:
        """Whether one more may have these pages, and so many that nobody has yet."""
        num_more = sum(page_id not in self._holds for page_id in shared) + num_private
        return self.num_pages + num_more <= self.max_pages

    def hold(self, page_ids: Sequence[int]) -> None:
        self._holds.update(page_ids)

    def let_go(self, page_ids: Sequence[int]) -> None:
        for page_id in page_ids:
            self._holds[page_id] -= 1
            if not self._holds[page_id]:
                del self._holds[page_id]

    def holds(self) -> dict[int, int]:
        """How many have each page, for whoever counts afresh."""
        return dict(self._holds)
