"""Page bookkeeping against a brute-force model."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.engine.kvcache.cache_manager import CacheManager, PageHandle
from tandem.engine.kvcache.eviction.table import EVICTION_POLICIES
from tandem.engine.kvcache.page_ceiling import PageCeiling
from tandem.engine.kvcache.radix_cache import CachedPrefix
from tests.fakes.transport import ManualCompletion

PAGE_SIZE = 2
NUM_PAGES = 10
MAX_BOUNDED_PAGES = 6
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=11)
NAMESPACES = st.sampled_from(["", "tenant"])
MOVING_KEYS = ("tests.fakes.eviction:NeverTheSame", "tests.fakes.eviction:EverLater")


@dataclass(eq=False)
class Held:
    handle: PageHandle
    namespace: str
    tokens: list[int]
    computed_len: int
    is_bounded: bool

    def prefix(self, page_index: int) -> tuple[object, ...]:
        return (self.namespace, *self.tokens[: (page_index + 1) * PAGE_SIZE])

    copies: list[ManualCompletion] = field(default_factory=list)


@dataclass(eq=False)
class Loaded:
    handle: PageHandle
    prefix: CachedPrefix
    namespace: str
    tokens: list[int]


class CacheMachine(RuleBasedStateMachine):
    """Record each page's expected content and check it at every reuse.

    This reveals a held page given out twice, or a page found under other tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache = CacheManager(NUM_PAGES, PAGE_SIZE)
        self.held: list[Held] = []
        self.deferred: list[tuple[list[int], list[ManualCompletion], bool]] = []
        self.ceiling = PageCeiling(MAX_BOUNDED_PAGES)
        self.content: dict[int, tuple[object, ...]] = {}
        # Held pages and their content.
        self.copied: list[tuple[int, tuple[object, ...]]] = []
        self.loads: list[Loaded] = []

    @initialize(policy=st.sampled_from((*EVICTION_POLICIES.names, *MOVING_KEYS)))
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

    @rule(
        tokens=TOKENS,
        namespace=NAMESPACES,
        priority=st.integers(0, 2),
        reserved=st.integers(0, 3),
        is_bounded=st.booleans(),
    )
    def acquire(self, tokens: list[int], namespace: str, priority: int, reserved: int, is_bounded: bool) -> None:
        available = self.cache.num_available_pages
        bounded = self.bounded_pages()
        handle = self.cache.acquire_pages(
            tokens,
            len(tokens),
            max_cached_len=len(tokens) - 1,
            namespace=namespace,
            priority=priority,
            num_reserved=reserved,
            ceiling=self.ceiling if is_bounded else None,
        )
        if handle is None:
            matched = self.cache.peek(tokens, namespace)[: self.num_matchable(tokens)]
            num_more = self.cache.num_pages_for(len(tokens)) - len(bounded.intersection(matched))
            is_over = is_bounded and len(bounded) + num_more > MAX_BOUNDED_PAGES
            assert is_over or -(-len(tokens) // PAGE_SIZE) + reserved > available - self.num_matchable(tokens)
            return
        if is_bounded:
            assert len(bounded.union(handle.page_ids)) <= MAX_BOUNDED_PAGES, "more pages than its class may have"
        held = Held(handle, namespace, tokens, handle.cached_len, is_bounded)
        for i in range(handle.num_shared):
            assert self.content[handle.page_ids[i]] == held.prefix(i), "a wrong page was found"
        in_use = {p for h in self.held for p in h.handle.page_ids} | {p for pages, *_ in self.deferred for p in pages}
        assert not in_use & set(handle.page_ids[handle.num_shared :]), "a page was given out twice"
        copied = {page_id for page_id, _ in self.copied} | {p for load in self.loads for p in load.handle.page_ids}
        assert not copied & set(handle.page_ids[handle.num_shared :]), "a page was given out while it is copied"
        self.held.append(held)

    def bounded_pages(self) -> set[int]:
        """Return the pages under the ceiling, of handles and of pending operations."""
        held = {p for h in self.held if h.is_bounded for p in h.handle.page_ids}
        return held | {p for pages, _, is_bounded in self.deferred if is_bounded for p in pages}

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

    @precondition(lambda self: any(not held.is_bounded for held in self.held))
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        held = data.draw(st.sampled_from([held for held in self.held if not held.is_bounded]))
        pages_before = list(held.handle.page_ids)
        if self.cache.grow_pages(held.handle, len(held.tokens) + 1):
            held.tokens = [*held.tokens, token]
        else:
            assert list(held.handle.page_ids) == pages_before and self.cache.num_available_pages <= 0

    @precondition(lambda self: self.held)
    @rule(data=st.data(), num_copies=st.integers(0, 2))
    def release(self, data: st.DataObject, num_copies: int) -> None:
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        copies = [ManualCompletion() for _ in range(num_copies)]
        if copies:
            self.deferred.append((list(held.handle.page_ids), copies, held.is_bounded))
        self.cache.release_pages(held.handle, after=copies)

    @precondition(lambda self: self.deferred)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.deferred) - 1))
        copies = self.deferred[index][1]
        copies.pop().is_done = True
        if not copies:
            self.deferred.pop(index)
        self.cache.free_deferred_pages()

    @rule(tokens=TOKENS, namespace=NAMESPACES, reserved=st.integers(0, 3))
    def begin_load(self, tokens: list[int], namespace: str, reserved: int) -> None:
        prefix = self.cache.find_cached(tokens, namespace)
        num_pages = len(tokens) // PAGE_SIZE - prefix.num_pages
        if num_pages <= 0:
            return
        handle = self.cache.acquire_behind(prefix, num_pages, namespace, 0, reserved)
        if handle is None:
            assert num_pages + reserved > self.cache.num_available_pages
            return
        in_use = {p for h in self.held for p in h.handle.page_ids} | {p for pages, *_ in self.deferred for p in pages}
        in_use |= {page_id for page_id, _ in self.copied} | {p for load in self.loads for p in load.handle.page_ids}
        assert not in_use & set(handle.page_ids), "a page was given out twice"
        self.loads.append(Loaded(handle, prefix, namespace, tokens))

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        load = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        prefixes = [
            (load.namespace, *load.tokens[: (load.prefix.num_pages + i + 1) * PAGE_SIZE])
            for i in range(len(load.handle.page_ids))
        ]
        self.content.update(zip(load.handle.page_ids, prefixes, strict=True))
        was_evicted = load.prefix.is_evicted
        prefix = self.cache.cache_behind(load.handle, load.prefix, load.tokens)
        pages = self.cache.peek(load.tokens, load.namespace)
        if was_evicted:
            assert prefix.num_pages == 0
        else:
            assert prefix.num_pages == len(pages) == len(load.tokens) // PAGE_SIZE
            assert prefix.node is not None and prefix.node.page_id == pages[-1]
            assert self.cache.find_cached(load.tokens, load.namespace, load.prefix) == prefix
        for i, page_id in enumerate(pages):
            assert self.content[page_id] == (load.namespace, *load.tokens[: (i + 1) * PAGE_SIZE])

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def hold(self, tokens: list[int], namespace: str) -> None:
        node, num_pages = self.cache.find_cached(tokens, namespace)
        if num_pages:
            assert node is not None and self.cache.peek(tokens, namespace)[-1] == node.page_id
            self.cache.hold_page(node)
            self.copied.append((node.page_id, self.content[node.page_id]))

    @precondition(lambda self: self.copied)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        page_id, content = self.copied.pop(data.draw(st.integers(0, len(self.copied) - 1)))
        assert self.content[page_id] == content, "a page was overwritten while it was copied"
        self.cache.let_go_page(page_id)

    @rule()
    def drop(self) -> None:
        num_locked = self.cache.num_locked_pages
        self.cache.drop_cached_pages()
        assert self.cache.num_cached_pages == 0
        assert num_locked <= self.cache.num_locked_pages <= num_locked + self.cache.num_held_pages

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
        assert self.ceiling.num_pages == len(self.bounded_pages())

    def teardown(self) -> None:
        for held in self.held:
            self.cache.release_pages(held.handle)
        for page_id, _ in self.copied:
            self.cache.let_go_page(page_id)
        for load in self.loads:
            self.cache.release_pages(load.handle)
        for _, copies, _ in self.deferred:
            for copy in copies:
                copy.is_done = True
        self.cache.free_deferred_pages()
        assert (self.cache.num_locked_pages, self.ceiling.num_pages) == (0, 0)
        assert self.cache.num_free_pages + self.cache.num_cached_pages == NUM_PAGES


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
