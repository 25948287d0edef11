"""Copies of stored pages into the pool, and their entry into the radix tree."""

from collections.abc import Callable

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.pagestore.client.base import RegionCopies
from tandem.pagestore.client.load_rate import LoadRate
from tandem.pagestore.client.prefetch import Load, Prefetch

# Pages of a copy, and pages that a turn starts and enters at least, at 4 us each: a turn that delays the next step is
# short.
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

    A prompt's copies follow each other without a pause, however long turns are. The device gets them in small batches
    (`cuda_copies.MAX_SUBMITTED`), so forward passes do not wait for those that run.

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
        # Pages that this turn may start and enter.
        self._turn_pages = self._num_to_start = self._num_to_enter = MAX_LOAD_PAGES
        self.num_held = 0

    @property
    def is_running(self) -> bool:
        return bool(self._loading)

    def begin_turn(self, num_pages: int) -> None:
        """Args: num_pages: that a long turn may start, and enter."""
        self._turn_pages = self._num_to_start = self._num_to_enter = max(MAX_LOAD_PAGES, num_pages)

    def start(self, prefetch: Prefetch, now: float) -> bool:
        """Begins to copy found pages that are not cached, as many as this turn still may. Returns False if the prefetch
        cannot go on: its first pages were evicted, or others too often."""
        while (limit := self._limit(now)) > 0:
            if not prefetch.loads:
                # The tree may have gained or lost pages since the last copy.
                prefetch.cached = self._cache.find_cached(prefetch.token_ids, prefetch.namespace, prefetch.cached)
                prefetch.num_entered = prefetch.cached.num_pages - prefetch.base
                if prefetch.num_entered < 0:
                    return False
            elif prefetch.cached.is_evicted or prefetch.cached.num_pages != prefetch.loads[0].first:
                # The running copies are a miss. Further ones would be, too.
                return True
            slots = prefetch.slots[prefetch.num_begun :][:limit]
            if not slots:
                return True
            if prefetch.num_copied + len(slots) > MAX_TIMES * len(prefetch.keys):
                return False
            handle = self._cache.acquire_behind(
                prefetch.cached, len(slots), prefetch.namespace, prefetch.priority, self._num_reserved
            )
            if handle is None:
                prefetch.retry_at = now + RETRY_S
                return True
            if not prefetch.loads:
                self._loading.append(prefetch)
            first = prefetch.base + prefetch.num_begun
            prefetch.loads.append(Load(handle, first, self._copies.copy_in(slots, handle.page_ids)))
            self.num_held += len(slots)
            self._num_to_start -= len(slots)
            prefetch.num_copied += len(slots)
        return True

    def collect(self, mark: int) -> list[Prefetch]:
        """Handles ended copies, as far as this turn may enter their pages. Returns their prefetches.

        Args:
            mark: of pages that the store has.
        """
        ended = []
        for prefetch in list(self._loading):
            before = len(prefetch.loads)
            while (
                prefetch.loads and self._num_to_enter >= prefetch.loads[0].num_pages and prefetch.loads[0].copy.done()
            ):
                self._end_first(prefetch, mark)
            if len(prefetch.loads) < before:
                ended.append(prefetch)
            if not prefetch.loads:
                self._loading.remove(prefetch)
        return ended

    def abandon(self) -> None:
        """Keeps the pages of running copies out of the tree."""
        for prefetch in self._loading:
            for load in prefetch.loads:
                load.may_enter = False

    def check_integrity(self) -> str:
        """Recounts the pages that copies write; returns the first violation, or ""."""
        held = sum(load.num_pages for p in self._loading for load in p.loads)
        return "" if held == self.num_held else f"loads hold {held} pages, but count {self.num_held}"

    def _limit(self, now: float) -> int:
        """Returns the largest number of pages of the next copy."""
        # The last copy of a turn runs on while the next turn begins.
        num_running = min(self._max_held, self._turn_pages + MAX_LOAD_PAGES) - self.num_held
        limit = min(MAX_LOAD_PAGES, self._num_to_start, num_running)
        if self._rate.is_known(now):
            return limit
        return 0 if self._loading else min(limit, PROBE_PAGES)

    def _end_first(self, prefetch: Prefetch, mark: int) -> None:
        load = prefetch.loads.popleft()
        num_pages = load.num_pages
        self.num_held -= num_pages
        self._rate.copied(num_pages, load.copy.seconds, self._clock())
        # Without the pages before them, these are a miss.
        if load.may_enter and load.first == prefetch.cached.num_pages:
            self._num_to_enter -= num_pages
            self._enter(prefetch, load, mark)
        else:
            self._cache.release_pages(load.handle)

    def _enter(self, prefetch: Prefetch, load: Load, mark: int) -> None:
        prefetch.cached = self._cache.cache_behind(load.handle, prefetch.cached, prefetch.token_ids)
        node = prefetch.cached.node
        for place in range(prefetch.cached.num_pages - 1, load.first - 1, -1):
            assert node is not None
            node.store_key, node.store_mark = prefetch.keys[place - prefetch.base], mark
            prefetch.loaded[place] = prefetch.tiers[place - prefetch.base]
            node = node.parent
        prefetch.num_entered = max(prefetch.cached.num_pages - prefetch.base, 0)
