from collections.abc import Iterable


class PageAllocator:
    """Free list over page ids 0 to num_pages - 1, used only by the CacheManager."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        # The last freed page, on top, is likeliest in a CPU cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = bytearray([1]) * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_pages: int) -> list[int]:
        assert 0 <= num_pages <= len(self._free)
        if num_pages == 0:
            return []
        taken = self._free[-num_pages:][::-1]
        del self._free[-num_pages:]
        for page_id in taken:
            self._is_free[page_id] = 0
        return taken

    def free(self, page_ids: Iterable[int]) -> None:
        """Asserts against a double free, which would give one page to two requests."""
        for page_id in page_ids:
            assert not self._is_free[page_id], f"page {page_id} freed twice"
            self._is_free[page_id] = 1
            self._free.append(page_id)

    def free_pages(self) -> list[int]:
        return list(self._free)
