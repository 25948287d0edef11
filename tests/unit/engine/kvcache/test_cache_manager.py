"""Page reuse, eviction and deferred frees."""

from tandem.engine.kvcache.cache_manager import CacheManager, PageHandle
from tandem.engine.kvcache.page_table import NO_COPY
from tests.fakes.transport import ManualCompletion


def hold(cache: CacheManager, token_ids: list[int], **kwargs: object) -> PageHandle:
    handle = cache.acquire_pages(token_ids, len(token_ids), max_cached_len=len(token_ids), **kwargs)  # type: ignore[arg-type]
    assert handle is not None
    return handle


def test_released_sequence_is_cached() -> None:
    cache = CacheManager(8, 2)
    first = hold(cache, [1, 2, 3, 4, 5])
    cache.cache_pages(first, [1, 2, 3, 4, 5], 5)
    cache.release_pages(first)
    assert (cache.num_cached_pages, cache.num_free_pages) == (2, 6)
    second = hold(cache, [1, 2, 3, 4, 9])
    assert second.cached_len == 4
    assert second.page_ids[:2] == first.page_ids[:2]
    assert hold(cache, [1, 2, 9, 9]).cached_len == 2


def test_max_cached_len_leaves_a_token_to_compute() -> None:
    cache = CacheManager(8, 2)
    first = hold(cache, [1, 2, 3, 4])
    cache.cache_pages(first, [1, 2, 3, 4], 4)
    handle = cache.acquire_pages([1, 2, 3, 4], 4, max_cached_len=3)
    assert handle is not None and handle.cached_len == 2


def test_duplicates_are_remapped_before_they_are_freed() -> None:
    cache = CacheManager(8, 2)
    tokens = [1, 2, 3, 4, 5]
    first, second = hold(cache, tokens), hold(cache, tokens)
    own_pages = list(second.page_ids)
    cache.cache_pages(first, tokens, 5)
    cache.cache_pages(second, tokens, 5)
    assert second.page_ids[:2] == first.page_ids[:2]
    assert second.page_ids[2] == own_pages[2] != first.page_ids[2]
    assert cache.num_free_pages == 4
    assert cache.check_integrity() == ""


def test_a_remapped_page_table_has_no_valid_copy_on_other_ranks() -> None:
    """They would go on writing the duplicate page after it is freed."""
    cache = CacheManager(8, 2)
    tokens = [1, 2, 3, 4, 5]
    first, second = hold(cache, tokens), hold(cache, tokens)
    outdated: list[int] = []
    first.page_ids.set_copy(3, outdated)
    second.page_ids.set_copy(4, outdated)
    cache.cache_pages(first, tokens, 5)
    assert cache.grow_pages(first, 7)
    cache.cache_pages(second, tokens, 5)
    assert (first.page_ids.copy_id, second.page_ids.copy_id) == (3, NO_COPY)
    assert outdated == [4]


def test_locked_pages_are_not_evicted_and_the_least_recently_used_go_first() -> None:
    cache = CacheManager(6, 2)
    for tokens in ([1, 2], [3, 4], [5, 6]):
        handle = hold(cache, tokens)
        cache.cache_pages(handle, tokens, 2)
        cache.release_pages(handle)
    cache.touch([1, 2])
    locked = hold(cache, [3, 4])
    # Three free pages and two evictable ones: [5, 6] goes before [1, 2].
    held = hold(cache, [7] * 8)
    assert cache.num_cached_pages == 1
    assert hold(cache, [1, 2]).cached_len == 2
    assert cache.acquire_pages([9, 9], 2, max_cached_len=2) is None
    assert locked.cached_len == 2 and held.cached_len == 0


def test_failed_acquire_evicts_nothing() -> None:
    cache = CacheManager(4, 2)
    handle = hold(cache, [1, 2])
    cache.cache_pages(handle, [1, 2], 2)
    cache.release_pages(handle)
    assert cache.acquire_pages([5] * 10, 10, max_cached_len=10) is None
    assert cache.acquire_pages([5] * 8, 8, max_cached_len=8, num_reserved=1) is None
    assert cache.num_cached_pages == 1
    assert hold(cache, [5] * 8).cached_len == 0


def test_match_is_locked_before_eviction() -> None:
    cache = CacheManager(4, 2)
    handle = hold(cache, [1, 2, 3, 4])
    cache.cache_pages(handle, [1, 2, 3, 4], 4)
    cache.release_pages(handle)
    # Two cached and two free pages: six tokens fit only beside the match.
    handle = hold(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert handle.cached_len == 4
    assert len(set(handle.page_ids)) == 4


def test_pages_are_freed_after_their_launches() -> None:
    cache = CacheManager(4, 2)
    copies = [ManualCompletion(), ManualCompletion()]
    cache.release_pages(hold(cache, [1, 2, 3, 4, 5]), after=copies)
    assert (cache.num_free_pages, cache.num_locked_pages) == (1, 3)
    copies[0].is_done = True
    cache.free_deferred_pages()
    assert cache.num_free_pages == 1
    copies[1].is_done = True
    cache.free_deferred_pages()
    assert cache.num_free_pages == 4


def test_clearing_drops_cached_pages_but_keeps_used_ones() -> None:
    cache = CacheManager(8, 2)
    old, used = [1, 2, 3, 4], [1, 2, 7, 8]
    for tokens in (old, used):
        handle = hold(cache, tokens)
        cache.cache_pages(handle, tokens, 4)
        cache.release_pages(handle)
    handle = hold(cache, used)
    cache.drop_cached_pages()
    assert (cache.num_cached_pages, cache.num_locked_pages, cache.num_free_pages) == (0, 2, 6)
    assert len(cache.peek(old)) == 1 and len(cache.peek(used)) == 2
    cache.release_pages(handle)
    cache.drop_cached_pages()
    assert cache.num_free_pages == 8 and cache.num_namespaces == 0
    assert cache.check_integrity() == ""


def test_held_page_is_freed_after_its_last_hold() -> None:
    cache = CacheManager(4, 2)
    handle = hold(cache, [1, 2, 3, 4])
    cache.cache_pages(handle, [1, 2, 3, 4], 4)
    cache.release_pages(handle)
    node, num_pages = cache.find_cached([1, 2, 3, 4, 5])
    assert node is not None and num_pages == 2
    cache.hold_page(node)
    cache.hold_page(node)
    # Evictable, but it frees no page.
    assert (cache.num_held_pages, cache.num_available_pages) == (1, 3)
    assert cache.acquire_pages([9] * 8, 8, max_cached_len=0) is None
    other = hold(cache, [9] * 6)
    assert node.is_evicted and node.page_id not in other.page_ids
    assert (cache.num_available_pages, cache.num_locked_pages) == (0, 4)
    assert cache.check_integrity() == ""
    cache.let_go_page(node.page_id)
    assert cache.num_free_pages == 0
    cache.let_go_page(node.page_id)
    assert (cache.num_free_pages, cache.num_held_pages) == (1, 0)
    assert cache.check_integrity() == ""


def test_watch_sees_entered_pages_and_reused_prefixes() -> None:
    cache = CacheManager(8, 2)
    watch = cache.watch_tree()
    handle = hold(cache, [1, 2, 3, 4])
    cache.cache_pages(handle, [1, 2, 3, 4], 4)
    assert [node.page_id for node in watch.entered] == list(handle.page_ids)
    assert not watch.matched
    hold(cache, [1, 2, 9])
    assert [node.key for node in watch.matched] == [(1, 2)]
    root = watch.entered[0].parent
    assert root is not None and root.is_root and cache.namespace_of(root) == ""


def test_loaded_pages_continue_a_prefix_without_locks() -> None:
    cache = CacheManager(8, 2)
    handle = hold(cache, [1, 2, 3, 4])
    cache.cache_pages(handle, [1, 2, 3, 4], 4)
    cache.release_pages(handle)
    prefix = cache.find_cached([1, 2, 3, 4, 5, 6, 7, 8])
    loaded = cache.acquire_behind(prefix, 2, "", 0, num_reserved=4)
    assert loaded is not None and len(loaded.page_ids) == 2
    assert (cache.num_available_pages, cache.num_attempts) == (6, 2)
    assert cache.acquire_behind(prefix, 2, "", 0, num_reserved=5) is None
    other = hold(cache, [1, 2, 3, 4, 5, 6])
    cache.cache_pages(other, [1, 2, 3, 4, 5, 6], 6)
    page_ids = list(loaded.page_ids)
    end = cache.cache_behind(loaded, prefix, [1, 2, 3, 4, 5, 6, 7, 8])
    # A page that was computed meanwhile stays, and the loaded one is free.
    assert end.num_pages == 4
    assert cache.peek([1, 2, 3, 4, 5, 6, 7, 8])[2:] == [other.page_ids[2], page_ids[1]]
    assert (cache.num_free_pages, cache.num_locked_pages) == (4, 3)
    cache.release_pages(other)
    cache.drop_cached_pages()
    assert cache.num_free_pages == 8 and cache.num_namespaces == 0
    assert cache.check_integrity() == ""


def test_loaded_pages_of_an_evicted_prefix_are_freed() -> None:
    cache = CacheManager(8, 2)
    handle = hold(cache, [1, 2, 3, 4])
    cache.cache_pages(handle, [1, 2, 3, 4], 4)
    cache.release_pages(handle)
    prefix = cache.find_cached([1, 2, 3, 4, 5, 6])
    loaded = cache.acquire_behind(prefix, 1, "", 0, 0)
    assert loaded is not None
    cache.drop_cached_pages()
    assert cache.cache_behind(loaded, prefix, [1, 2, 3, 4, 5, 6]).num_pages == 0
    assert cache.num_free_pages == 8 and cache.num_namespaces == 0
    assert cache.find_cached([1, 2], "", prefix) == (None, 0)


def test_prefix_of_a_load_is_evicted_last() -> None:
    cache = CacheManager(4, 2)
    for tokens in ([1, 2], [3, 4]):
        handle = hold(cache, tokens)
        cache.cache_pages(handle, tokens, 2)
        cache.release_pages(handle)
    assert cache.acquire_behind(cache.find_cached([1, 2, 3, 4]), 1, "", 0, 0) is not None
    hold(cache, [9] * 4)
    assert (len(cache.peek([1, 2])), len(cache.peek([3, 4]))) == (1, 0)


def test_withheld_pages_are_not_seen_by_a_watch() -> None:
    cache = CacheManager(8, 2)
    watch = cache.watch_tree()
    old, running = hold(cache, [1, 2, 3, 4]), hold(cache, [5, 6])
    cache.cache_pages(old, [1, 2], 2)
    watch.entered.clear()
    cache.withhold_pages()
    cache.cache_pages(running, [5, 6], 2)
    continued = hold(cache, [1, 2, 7, 8])
    cache.cache_pages(continued, [1, 2, 7, 8], 4)
    cache.cache_pages(hold(cache, [9, 9]), [9, 9], 2)
    assert [node.key for node in watch.entered] == [(9, 9)]


def test_refused_requests_are_counted() -> None:
    cache = CacheManager(4, 2)
    handle = hold(cache, [1, 2, 3, 4])
    assert cache.acquire_pages([5] * 8, 8, max_cached_len=0) is None
    assert (cache.num_attempts, cache.num_refusals) == (2, 1)
    assert cache.grow_pages(handle, 4)
    assert not cache.grow_pages(handle, 9)
    assert (cache.num_attempts, cache.num_refusals) == (3, 2)


def test_namespaces_share_nothing() -> None:
    cache = CacheManager(8, 2)
    for namespace in ("", "tenant"):
        handle = cache.acquire_pages([1, 2, 3, 4], 4, max_cached_len=4, namespace=namespace)
        assert handle is not None and handle.cached_len == 0
        cache.cache_pages(handle, [1, 2, 3, 4], 4)
        cache.release_pages(handle)
    assert cache.num_cached_pages == 4
    assert not set(cache.peek([1, 2, 3, 4])) & set(cache.peek([1, 2, 3, 4], "tenant"))
    assert cache.peek([1, 2, 3, 4], "nobody") == []
    # Namespaces share one pool and evict each other's pages.
    hold(cache, [5] * 16)
    assert cache.num_cached_pages == 0


def test_empty_namespaces_are_forgotten() -> None:
    cache = CacheManager(8, 2)
    for i in range(100):
        cache.touch([1, 2, 3], f"tenant{i}")
        handle = cache.acquire_pages([1, 2, 3], 3, max_cached_len=2, namespace=f"tenant{i}")
        assert handle is not None
        if i % 2:
            cache.cache_pages(handle, [1, 2, 3], 3)
        cache.release_pages(handle)
    # One page for each of the last namespaces; the rest were evicted or never cached one.
    assert cache.num_namespaces == cache.num_cached_pages <= 8
    hold(cache, [5] * 16, namespace="other")
    assert cache.num_namespaces == 1
    assert cache.check_integrity() == ""


def test_integrity_check_finds_errors() -> None:
    cache = CacheManager(4, 2)
    handle = hold(cache, [1, 2, 3])
    cache.cache_pages(handle, [1, 2, 3], 3)
    assert cache.check_integrity() == ""
    stolen = handle.page_ids.pop()
    assert "no owner" in cache.check_integrity()
    handle.page_ids.append(handle.page_ids[0])
    assert "belongs to" in cache.check_integrity()
    handle.page_ids[-1] = stolen
    handle.node.num_locks += 1
    assert "locks" in cache.check_integrity()
