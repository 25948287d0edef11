"""Copies of stored pages into the pool, and their entry into the radix tree."""

from collections.abc import Callable

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.pagestore.client.base import RegionCopies
from tandem.pagestore.client.load_rate import LoadRate
from tandem.pagestore.client.prefetch import Load, Prefetch

# Pages of a copy. A turn starts one and enters one, at 4 us a page each: a turn that delays the next step is short.
MAX_LOAD_PAGES = 64
# Pages of a copy while the rate is not known.
PROBE_PAGES = 16
# Shares of the pool: loads hold at most one, and leave the other.
HELD_SHARE, RESERVED_SHARE = 1 / 4, 1 / 8
# Interval between attempts to get pages, in seconds.
RETRY_S = 0.005
# Copies of a prefetch's pages together, by their number: in a full pool, loads evict each other's pages.
MAX_TIMES = 2


class LoadCopies:
    """Loads hold pool pages only while their copies run, so they end by themselves and wait for nobody.

    A load locks nothing in the tree: if the prefix that it continues is evicted meanwhile, its pages are a miss.

    Attributes:
        num_held: pool pages that copies write.
    """

    def __init__(self, cache: CacheManager, copies: RegionCopies, rate: LoadRate, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._copies = copies
        self._rate = rate
        self._clock = clock
        self._max_held = max(1, int(cache.num_pages * HELD_SHARE))
        self._num_reserved = int(cache.num_pages * RESERVED_SHARE)
        self._loading: list[Prefetch] = []
        self._has_started = False
        self.num_held = 0

    @property
    def is_running(self) -> bool:
        return bool(self._loading)

    def begin_turn(self) -> None:
        self._has_started = False

    def start(self, prefetch: Prefetch, now: float) -> bool:
        """Begins to copy found pages that are not cached, unless this turn has begun a copy. Returns False if the
        prefetch cannot go on: its first pages were evicted, or others too often."""
        limit = min(MAX_LOAD_PAGES, self._max_held - self.num_held)
        if not self._rate.is_known(now):
            limit = 0 if self._loading else min(limit, PROBE_PAGES)
        if limit <= 0 or self._has_started:
            return True
        # The tree may have gained or lost pages since the Find.
        prefix = self._cache.find_cached(prefetch.token_ids, prefetch.namespace, prefetch.cached)
        prefetch.cached = prefix
        prefetch.num_entered = prefix.num_pages - prefetch.base
        slots = prefetch.slots[max(prefetch.num_entered, 0) :][:limit]
        if prefetch.num_entered < 0 or not slots:
            return prefetch.num_entered >= 0
        if prefetch.num_copied + len(slots) > MAX_TIMES * len(prefetch.keys):
            return False
        handle = self._cache.acquire_behind(
            prefix, len(slots), prefetch.namespace, prefetch.priority, self._num_reserved
        )
        if handle is None:
            prefetch.retry_at = now + RETRY_S
            return True
        copy = self._copies.copy_in(slots, handle.page_ids)
        self.num_held += len(slots)
        prefetch.num_copied += len(slots)
        prefetch.load = Load(handle, prefix, copy)
        self._has_started = True
        self._loading.append(prefetch)
        return True

    def collect(self, mark: int) -> list[Prefetch]:
        """Handles ended copies, up to the first whose pages enter the tree. Returns their prefetches.

        Args:
            mark: of pages that the store has.
        """
        ended = []
        for prefetch in [p for p in self._loading if p.load is not None and p.load.copy.done()]:
            load, prefetch.load = prefetch.load, None
            assert load is not None
            ended.append(prefetch)
            self._loading.remove(prefetch)
            num_pages = len(load.handle.page_ids)
            self.num_held -= num_pages
            self._rate.copied(num_pages, load.copy.seconds, self._clock())
            if load.may_enter:
                self._enter(prefetch, load, mark)
                break
            self._cache.release_pages(load.handle)
        return ended

    def abandon(self) -> None:
        """Keeps the pages of running copies out of the tree."""
        for prefetch in self._loading:
            assert prefetch.load is not None
            prefetch.load.may_enter = False

    def check_integrity(self) -> str:
        """Recounts the pages that copies write; returns the first violation, or ""."""
        held = sum(len(p.load.handle.page_ids) for p in self._loading if p.load is not None)
        return "" if held == self.num_held else f"loads hold {held} pages, but count {self.num_held}"

    def _enter(self, prefetch: Prefetch, load: Load, mark: int) -> None:
        first = load.prefix.num_pages
        prefetch.cached = self._cache.cache_behind(load.handle, load.prefix, prefetch.token_ids)
        node = prefetch.cached.node
        for place in range(prefetch.cached.num_pages - 1, first - 1, -1):
            assert node is not None
            node.store_key, node.store_mark = prefetch.keys[place - prefetch.base], mark
            prefetch.loaded[place] = prefetch.tiers[place - prefetch.base]
            node = node.parent
        prefetch.num_entered = max(prefetch.cached.num_pages - prefetch.base, 0)
