"""Page bookkeeping against a brute-force model."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kvcache.allocator import PageAllocator
from engine.kvcache.base import PageLayout
from engine.kvcache.cache_manager import CacheManager, PageHandle
from engine.kvcache.eviction.table import EVICTION_POLICIES
from engine.kvcache.pool import CpuKvPool
from tests.fakes.transport import ManualCompletion


def test_freeing_a_free_page_stops_at_once() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(pages[:1])


def hold(cache: CacheManager, token_ids: list[int], **kwargs: object) -> PageHandle:
    handle = cache.acquire_pages(token_ids, len(token_ids), max_cached_len=len(token_ids), **kwargs)  # type: ignore[arg-type]
    assert handle is not None
    return handle


def test_a_released_sequence_is_found_again() -> None:
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
    # The partial last page stays each request's own.
    assert second.page_ids[2] == own_pages[2] != first.page_ids[2]
    assert cache.num_free_pages == 4
    assert cache.check_integrity() == ""


def test_locked_pages_are_not_evicted_and_the_least_recently_used_go_first() -> None:
    cache = CacheManager(6, 2)
    for tokens in ([1, 2], [3, 4], [5, 6]):
        handle = hold(cache, tokens)
        cache.cache_pages(handle, tokens, 2)
        cache.release_pages(handle)
    cache.touch([1, 2])
    locked = hold(cache, [3, 4])
    # Three free pages and two that can be evicted: [5, 6] goes before [1, 2].
    held = hold(cache, [7] * 8)
    assert cache.num_cached_pages == 1
    assert hold(cache, [1, 2]).cached_len == 2
    assert cache.acquire_pages([9, 9], 2, max_cached_len=2) is None
    assert locked.cached_len == 2 and held.cached_len == 0


def test_acquiring_evicts_nothing_if_it_cannot_succeed() -> None:
    cache = CacheManager(4, 2)
    handle = hold(cache, [1, 2])
    cache.cache_pages(handle, [1, 2], 2)
    cache.release_pages(handle)
    assert cache.acquire_pages([5] * 10, 10, max_cached_len=10) is None
    assert cache.acquire_pages([5] * 8, 8, max_cached_len=8, num_reserved=1) is None
    assert cache.num_cached_pages == 1
    assert hold(cache, [5] * 8).cached_len == 0


def test_the_match_is_locked_before_room_is_made_for_the_rest() -> None:
    cache = CacheManager(4, 2)
    handle = hold(cache, [1, 2, 3, 4])
    cache.cache_pages(handle, [1, 2, 3, 4], 4)
    cache.release_pages(handle)
    # Two cached pages, two free: six tokens fit only beside the match, never on top of it.
    handle = hold(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert handle.cached_len == 4
    assert len(set(handle.page_ids)) == 4


def test_pages_at_the_gate_wait_for_what_was_launched_with_them() -> None:
    cache = CacheManager(4, 2)
    copies = [ManualCompletion(), ManualCompletion()]
    cache.release_pages(hold(cache, [1, 2, 3, 4, 5]), after=copies)
    assert (cache.num_free_pages, cache.num_locked_pages) == (1, 3)
    copies[0].is_done = True
    cache.poll()
    assert cache.num_free_pages == 1
    copies[1].is_done = True
    cache.poll()
    assert cache.num_free_pages == 4


def cached(cache: CacheManager, tokens: list[int], priority: int = 0) -> None:
    handle = cache.acquire_pages(tokens, len(tokens), max_cached_len=len(tokens), priority=priority)
    assert handle is not None
    cache.cache_pages(handle, tokens, len(tokens))
    cache.release_pages(handle)


@pytest.mark.parametrize(
    ("policy", "order"),
    [("lru", "bdca"), ("mru", "acdb"), ("fifo", "abcd"), ("lfu", "dbca"), ("priority", "dcab")],
)
def test_eviction_order(policy: str, order: str) -> None:
    cache = CacheManager(4, 2, policy)
    pages = {name: [ord(name), 0] for name in "abcd"}
    for name, priority in (("a", 5), ("b", 9), ("c", 0)):
        cached(cache, pages[name], priority)
    for name in "aacbcb":
        cache.touch(pages[name])
    cached(cache, pages["d"])
    for name in "ca":
        cache.touch(pages[name])
    # Now a and c have 3 hits, b 2, d none; b was accessed first, then d came, then c and a were accessed.
    evicted: list[str] = []
    for n in range(4):
        hold(cache, [1000 + n, 0])
        evicted += [name for name in "abcd" if name not in evicted and not cache.peek(pages[name])]
    assert "".join(evicted) == order


def test_leaves_go_before_what_they_hang_on() -> None:
    for policy in ("lru", "mru", "fifo", "lfu", "priority"):
        cache = CacheManager(4, 2, policy)
        cached(cache, [1, 2, 3, 4, 5, 6])
        hold(cache, [9, 9, 9, 9])
        assert len(cache.peek([1, 2, 3, 4, 5, 6])) == 2, policy


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
    # One pool: the pages of any namespace make room for another.
    hold(cache, [5] * 16)
    assert cache.num_cached_pages == 0


def test_namespaces_that_hold_nothing_are_forgotten() -> None:
    cache = CacheManager(8, 2)
    for i in range(100):
        cache.touch([1, 2, 3], f"tenant{i}")
        handle = cache.acquire_pages([1, 2, 3], 3, max_cached_len=2, namespace=f"tenant{i}")
        assert handle is not None
        if i % 2:
            cache.cache_pages(handle, [1, 2, 3], 3)
        cache.release_pages(handle)
    # One page each for the last of those that cached one; the rest were evicted or never had any.
    assert cache.num_namespaces == cache.num_cached_pages <= 8
    hold(cache, [5] * 16, namespace="other")
    assert cache.num_namespaces == 1
    assert cache.check_integrity() == ""


def test_integrity_check_sees_what_is_wrong() -> None:
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


def test_a_pool_that_does_not_fit_says_so_in_numbers() -> None:
    layout = PageLayout(num_layers=32, page_size=16, num_kv_heads=8, head_dim=128, dtype="float32")
    with pytest.raises(ValueError, match=r"10000000 pages of \d+ bytes needs \d+ MiB, but only \d+ MiB"):
        CpuKvPool(layout, 10_000_000, "too-large")


def test_pages_of_a_pool_are_contiguous_and_not_shared() -> None:
    layout = PageLayout(num_layers=3, page_size=4, num_kv_heads=2, head_dim=8, dtype="bfloat16")
    pool = CpuKvPool(layout, 5, "contiguous")
    pool.kv[2] = 1.5
    assert layout.page_bytes == 3 * 2 * 4 * 2 * 8 * 2
    assert pool.kv[2].is_contiguous()
    assert int((pool.page_bytes_view != 0).any(dim=1).sum()) == 1


PAGE_SIZE = 2
NUM_PAGES = 10
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=11)
NAMESPACES = st.sampled_from(["", "tenant"])


@dataclass(eq=False)
class Held:
    handle: PageHandle
    namespace: str
    tokens: list[int]
    computed_len: int

    def prefix(self, page_index: int) -> tuple[object, ...]:
        """What the KV of a page depends on: everything up to its end."""
        return (self.namespace, *self.tokens[: (page_index + 1) * PAGE_SIZE])

    copies: list[ManualCompletion] = field(default_factory=list)


class CacheMachine(RuleBasedStateMachine):
    """Writes into a model of every page what its owner computes there, and reads it back at every reuse: a page that
    is given out while it is held, or found under other tokens, shows."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = CacheManager(NUM_PAGES, PAGE_SIZE)
        self.held: list[Held] = []
        self.gate: list[tuple[list[int], list[ManualCompletion]]] = []
        self.content: dict[int, tuple[object, ...]] = {}

    @initialize(policy=st.sampled_from(EVICTION_POLICIES.names))
    def choose_policy(self, policy: str) -> None:
        self.cache = CacheManager(NUM_PAGES, PAGE_SIZE, policy)

    def computed(self, held: Held, length: int) -> None:
        for i in range(length // PAGE_SIZE):
            page_id, prefix = held.handle.page_ids[i], held.prefix(i)
            if (i + 1) * PAGE_SIZE <= held.computed_len:
                assert self.content[page_id] == prefix, "a page in use was overwritten"
            else:
                assert i >= held.handle.num_shared, "a shared page was written"
                self.content[page_id] = prefix
        held.computed_len = max(held.computed_len, length)

    @rule(tokens=TOKENS, namespace=NAMESPACES, priority=st.integers(0, 2), reserved=st.integers(0, 3))
    def acquire(self, tokens: list[int], namespace: str, priority: int, reserved: int) -> None:
        available = self.cache.num_available_pages
        handle = self.cache.acquire_pages(
            tokens,
            len(tokens),
            max_cached_len=len(tokens) - 1,
            namespace=namespace,
            priority=priority,
            num_reserved=reserved,
        )
        if handle is None:
            assert -(-len(tokens) // PAGE_SIZE) + reserved > available - self.num_matchable(tokens)
            return
        held = Held(handle, namespace, tokens, handle.cached_len)
        for i in range(handle.num_shared):
            assert self.content[handle.page_ids[i]] == held.prefix(i), "a wrong page was found"
        in_use = {p for h in self.held for p in h.handle.page_ids} | {p for pages, _ in self.gate for p in pages}
        assert not in_use & set(handle.page_ids[handle.num_shared :]), "a page was given out twice"
        self.held.append(held)

    def num_matchable(self, tokens: list[int]) -> int:
        return (len(tokens) - 1) // PAGE_SIZE

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        length = data.draw(st.integers(held.computed_len, len(held.tokens)))
        self.computed(held, length)
        self.cache.cache_pages(held.handle, held.tokens, held.computed_len)
        for i in range(held.computed_len // PAGE_SIZE):
            assert self.content[held.handle.page_ids[i]] == held.prefix(i)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        held = data.draw(st.sampled_from(self.held))
        pages_before = list(held.handle.page_ids)
        if self.cache.grow_pages(held.handle, len(held.tokens) + 1):
            held.tokens = [*held.tokens, token]
        else:
            assert list(held.handle.page_ids) == pages_before and self.cache.num_available_pages == 0

    @precondition(lambda self: self.held)
    @rule(data=st.data(), num_copies=st.integers(0, 2))
    def release(self, data: st.DataObject, num_copies: int) -> None:
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        copies = [ManualCompletion() for _ in range(num_copies)]
        if copies:
            self.gate.append((list(held.handle.page_ids), copies))
        self.cache.release_pages(held.handle, after=copies)

    @precondition(lambda self: self.gate)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.gate) - 1))
        copies = self.gate[index][1]
        copies.pop().is_done = True
        if not copies:
            self.gate.pop(index)
        self.cache.poll()

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def touch(self, tokens: list[int], namespace: str) -> None:
        self.cache.touch(tokens, namespace)
        pages = self.cache.peek(tokens, namespace)
        assert [self.content[p] for p in pages] == [
            (namespace, *tokens[: (i + 1) * PAGE_SIZE]) for i in range(len(pages))
        ]

    @invariant()
    def is_whole(self) -> None:
        assert self.cache.check_integrity() == ""
        counts = (
            self.cache.num_free_pages,
            self.cache.num_cached_pages,
            self.cache.num_locked_pages,
            self.cache.num_leased_pages,
        )
        assert min(counts) >= 0 and sum(counts) == NUM_PAGES

    def teardown(self) -> None:
        for held in self.held:
            self.cache.release_pages(held.handle)
        for _, copies in self.gate:
            for copy in copies:
                copy.is_done = True
        self.cache.poll()
        assert self.cache.num_locked_pages == 0
        assert self.cache.num_free_pages + self.cache.num_cached_pages == NUM_PAGES


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
