from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.engine.kvcache.cache_manager import NO_PREFIX, PageHandle
from tandem.engine.kvcache.radix_cache import CachedPrefix
from tandem.pagestore.client.base import RegionCopy
from tandem.worker.page_tier import PrefetchKey


@dataclass(eq=False, slots=True)
class Load:
    """A copy from slots into pages that the handle holds.

    Attributes:
        first: place in the prompt of the first page.
        may_enter: False: the pages must not enter the tree.
    """

    handle: PageHandle
    first: int
    copy: RegionCopy
    may_enter: bool = True

    @property
    def num_pages(self) -> int:
        return len(self.handle.page_ids)


@dataclass(eq=False, slots=True)
class Prefetch:
    """A request's load, and its Find.

    Attributes:
        order: sort key: priority, then age.
        deadline: computing the pages would be done then; infinite if that is unknown.
        waits_until: the request waits no longer.
        num_pages: full pages of the prompt that may be loaded.
        cached: cached prefix found last; while loads run, the one that the first of them continues.
        base: place in the prompt of the first key's page.
        before: key of the page before it; None until it is known.
        keys: of the pages from `base` on.
        find: number of the Find; None before it is sent and after it has ended.
        asked_at, answered_at: times of the Find and of its latest answer; None before.
        slots, tiers: of the pages found so far.
        num_coming: pages that the store is still reading; meaningless before the first answer.
        is_asking: whether the store asks other nodes for more.
        num_entered: pages of `keys` that are in the tree, loaded or not.
        loads: running copies, each behind the pages of the one before.
        num_copied: copies of pages that have begun; more than pages, if some were evicted.
        leader: other prefetch that loads pages of this one.
        shared_end: number of the leader's keys up to the last that is this one's too.
        loaded: tier by place in the prompt, of pages that this prefetch or its leaders have loaded.
        retry_at: no load begins before, because the pool was full.
        is_over: nothing more will be loaded.
    """

    key: PrefetchKey
    token_ids: Sequence[int]
    namespace: str
    priority: int
    order: tuple[int, int]
    deadline: float
    waits_until: float
    num_pages: int
    cached: CachedPrefix = NO_PREFIX
    base: int = 0
    before: bytes | None = None
    keys: list[bytes] = field(default_factory=list)
    find: int | None = None
    asked_at: float = 0.0
    answered_at: float | None = None
    slots: list[int] = field(default_factory=list)
    tiers: list[int] = field(default_factory=list)
    num_coming: int = 0
    is_asking: bool = False
    num_entered: int = 0
    num_copied: int = 0
    loads: deque[Load] = field(default_factory=deque)
    leader: "Prefetch | None" = None
    shared_end: int = 0
    loaded: dict[int, int] = field(default_factory=dict)
    retry_at: float = 0.0
    is_over: bool = False

    @property
    def expects_answer(self) -> bool:
        """Whether the store will still say something about the Find."""
        return self.answered_at is None or self.num_coming > 0 or self.is_asking

    @property
    def has_all(self) -> bool:
        """Whether all pages that the store had are in the tree."""
        return not self.expects_answer and self.num_entered >= len(self.slots)

    @property
    def runs(self) -> bool:
        """Whether a copy or a Find of it is under way."""
        return bool(self.loads) or self.find is not None

    @property
    def num_begun(self) -> int:
        """Pages of `keys` that are in the tree or being copied."""
        if not self.loads:
            return self.num_entered
        last = self.loads[-1]
        return last.first + last.num_pages - self.base

    def num_loaded(self, tier: int) -> int:
        return sum(t == tier for t in self.loaded.values())

    def restart(self) -> None:
        """Forgets keys and answers, to begin again behind the prefix that is cached by now."""
        assert not self.runs
        self.before, self.keys, self.leader, self.answered_at = None, [], None, None
        self.slots, self.tiers, self.num_coming, self.num_entered = [], [], 0, 0
        self.is_asking = False
