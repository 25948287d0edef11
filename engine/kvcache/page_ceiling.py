from collections import Counter
from collections.abc import Sequence


class PageCeiling:
    """A page shared by several handles of the class counts once, until no operation uses its id."""

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages
        self._holds: Counter[int] = Counter()

    @property
    def num_pages(self) -> int:
        return len(self._holds)

    def fits(self, shared: Sequence[int], num_private: int) -> bool:
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
        return dict(self._holds)
