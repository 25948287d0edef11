"""Limits on the pages of one class of handles."""

from tandem.engine.kvcache.cache_manager import CacheManager, PageHandle
from tandem.engine.kvcache.page_ceiling import PageCeiling
from tests.fakes.transport import ManualCompletion


def acquire(cache: CacheManager, token_ids: list[int], ceiling: PageCeiling | None = None) -> PageHandle | None:
    return cache.acquire_pages(token_ids, len(token_ids), max_cached_len=len(token_ids), ceiling=ceiling)


def test_rest_of_the_pool_is_free_for_other_handles() -> None:
    cache, ceiling = CacheManager(10, 2), PageCeiling(6)
    first = acquire(cache, [1] * 8, ceiling)
    assert first is not None and ceiling.num_pages == 4
    assert acquire(cache, [2] * 6, ceiling) is None, "seven pages"
    assert (ceiling.num_pages, cache.num_available_pages) == (4, 6), "nothing has changed"
    assert acquire(cache, [3] * 12) is not None
    assert cache.check_integrity() == ""


def test_shared_pages_count_once() -> None:
    cache, ceiling = CacheManager(10, 2), PageCeiling(5)
    first = acquire(cache, [1] * 8, ceiling)
    assert first is not None
    cache.cache_pages(first, [1] * 8, 8)
    second = acquire(cache, [1] * 8 + [2], ceiling)
    assert second is not None and ceiling.num_pages == 5
    cache.release_pages(first)
    assert ceiling.num_pages == 5
    cache.release_pages(second)
    assert ceiling.num_pages == 0


def test_pages_of_other_handles_count_once_shared() -> None:
    cache, ceiling = CacheManager(10, 2), PageCeiling(4)
    other = acquire(cache, [1] * 8)
    assert other is not None
    cache.cache_pages(other, [1] * 8, 8)
    assert acquire(cache, [1] * 8 + [2], ceiling) is None, "if the other one ended it would keep five"
    assert acquire(cache, [1] * 6 + [2], ceiling) is not None and ceiling.num_pages == 4


def test_pages_count_until_their_launches_end() -> None:
    cache, ceiling = CacheManager(10, 2), PageCeiling(4)
    first = acquire(cache, [1] * 8, ceiling)
    assert first is not None
    copy = ManualCompletion()
    cache.release_pages(first, after=[copy])
    assert ceiling.num_pages == 4 and acquire(cache, [2], ceiling) is None
    assert cache.check_integrity() == ""
    copy.is_done = True
    cache.free_deferred_pages()
    assert ceiling.num_pages == 0 and acquire(cache, [2] * 8, ceiling) is not None
    assert cache.check_integrity() == ""


def test_wrong_count_is_detected() -> None:
    cache, ceiling = CacheManager(10, 2), PageCeiling(4)
    handle = acquire(cache, [1] * 8, ceiling)
    assert handle is not None
    ceiling.let_go(handle.page_ids[:1])
    assert cache.check_integrity() == "the pages under a ceiling are counted wrongly"


def test_leaked_pages_are_detected() -> None:
    """Such pages would be lost to the class forever."""
    cache, ceiling = CacheManager(10, 2), PageCeiling(4)
    handle = acquire(cache, [1] * 8, ceiling)
    assert handle is not None
    page_ids = [*handle.page_ids]
    cache.release_pages(handle)
    assert cache.check_integrity() == ""
    ceiling.hold(page_ids[:1])
    assert cache.check_integrity() == "the pages under a ceiling are counted wrongly"
