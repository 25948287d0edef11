"""A worker's side of the page store, on the engine thread."""

from collections.abc import Callable, Sequence
from itertools import count

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.launch_list import LaunchList
from tandem.messages import PageFormat
from tandem.pagestore.client.base import RegionCopies
from tandem.pagestore.client.events import FromStore, StoreClosed, StoreOpened
from tandem.pagestore.client.loading import PageLoader
from tandem.pagestore.client.node_keys import NodeKeys
from tandem.pagestore.client.turn_budget import TurnBudget
from tandem.pagestore.client.writing import PageWriter
from tandem.pagestore.client.yielding import Yielding
from tandem.pagestore.messages import DISK, HOST, PEER, Found, Purge, Purged, PutGranted, StoreClientMessage
from tandem.worker.events import Event
from tandem.worker.page_tier import PageTier, PrefetchKey, TierHits

# Time in seconds after which a reused page is offered to the store again, which may have evicted it.
OFFER_AGAIN_S = 30.0
# Poll interval for ended copies while the pool is left to the requests, in seconds.
POLL_S = 0.0005


class StoreTier(PageTier):
    """Writes pages of the tree to the store, and loads stored pages into it.

    A session of the store is an epoch. At its end no copy starts, and the session is told once all have ended.
    """

    def __init__(
        self,
        cache: CacheManager,
        launches: LaunchList,
        copies: RegionCopies,
        page_format: PageFormat,
        send: Callable[[str, StoreClientMessage], None],
        clock: Callable[[], float],
        compute_s: Callable[[int, int], float],
        write_after: int = 0,
    ) -> None:
        """
        Args:
            send: sends a message in an epoch, or drops it if the epoch is over.
            compute_s: returns the expected seconds until a prompt is computed, its queue included, of its cached tokens
                and its tokens to compute.
            write_after: hits of a page before it is written; 0: new pages are written.
        """
        self._cache = cache
        self._send_in_epoch = send
        self._clock = clock
        self._epoch: str | None = None
        self._when_quiet: list[Callable[[], None]] = []
        # Of Finds, Puts and Purges, in the order of sending.
        self._numbers = count(1)
        # Number of the last Purge until it lasts, whatever becomes of the store.
        self._purge_number: int | None = None
        # Mark of pages that were offered lately, in this epoch.
        self._mark = 1
        self._marked_at = clock()
        self._budget = TurnBudget(clock)
        self._keys = NodeKeys(cache, page_format)
        self._loader = PageLoader(cache, copies, self._keys, clock, compute_s, self._numbers, self._send)
        self._writer = PageWriter(cache, launches, copies, self._keys, clock, write_after, self._numbers, self._send)
        self._yielding = Yielding(cache, clock)

    def prefetch(self, key: PrefetchKey, token_ids: Sequence[int], namespace: str, priority: int = 0) -> None:
        self._loader.prefetch(key, token_ids, namespace, priority)

    def is_loading(self, key: PrefetchKey) -> bool:
        return self._loader.is_loading(key)

    def end(self, key: PrefetchKey) -> TierHits:
        return self._loader.end(key)

    def yields_pages(self) -> bool:
        if not self._num_held_pages:
            return False
        self._yielding.begin()
        return True

    def load_token_s(self) -> tuple[float, ...]:
        times = (self._loader.rate.page_s(tier) for tier in (HOST, DISK, PEER))
        return tuple((time or 0.0) / self._cache.page_size for time in times)

    def receive(self, event: Event) -> None:
        if isinstance(event, StoreOpened):
            self._close()
            self._epoch = event.epoch
            self._change_mark()
            self._loader.open()
            self._writer.open()
            if self._purge_number is not None:
                self._send(Purge(self._purge_number))
        elif isinstance(event, StoreClosed):
            if event.epoch == self._epoch:
                self._close()
            self._when_quiet.append(event.when_quiet)
            self._tell_quiet()
        elif isinstance(event, FromStore) and event.epoch == self._epoch:
            if isinstance(event.message, Found):
                self._loader.receive(event.message)
            elif isinstance(event.message, PutGranted):
                self._writer.receive(event.message)
            elif isinstance(event.message, Purged) and event.message.number == self._purge_number:
                self._purge_number = None

    def settle(self) -> bool:
        num_pages = self._budget.begin()
        self._keys.begin_turn(num_pages)
        self._loader.begin_turn(num_pages)
        has_loaded = self._loader.collect(self._mark)
        self._writer.collect()
        self._tell_quiet()
        if self._clock() >= self._marked_at + OFFER_AGAIN_S:
            self._change_mark()
        may_start = self._yielding.may_start(self._num_held_pages)
        # Loads go first: their requests wait.
        self._loader.go_on(may_start=may_start)
        self._writer.go_on(self._mark, may_start=may_start)
        self._yielding.end_turn(self._num_held_pages)
        return has_loaded

    def next_deadline(self) -> float | None:
        deadlines = [self._loader.next_deadline(), self._writer.next_deadline()]
        if self._yielding.is_yielding:
            deadlines.append(self._clock() + POLL_S)
        return min((d for d in deadlines if d is not None), default=None)

    def reset(self) -> None:
        self._loader.reset()
        self._writer.reset()
        self._change_mark()
        self._purge_number = next(self._numbers)
        self._send(Purge(self._purge_number))

    def check_integrity(self) -> str:
        num_held = self._cache.num_held_pages
        if num_held > self._writer.num_held_pages:
            return f"{num_held} pages are held, but only {self._writer.num_held_pages} copied out"
        return self._loader.check_integrity() or self._writer.check_integrity()

    @property
    def _num_held_pages(self) -> int:
        return self._loader.num_held_pages + self._writer.num_held_pages

    def _send(self, message: StoreClientMessage) -> None:
        if self._epoch is not None:
            self._send_in_epoch(self._epoch, message)

    def _change_mark(self) -> None:
        self._mark += 1
        self._marked_at = self._clock()

    def _close(self) -> None:
        self._epoch = None
        self._loader.close()
        self._writer.close()

    def _tell_quiet(self) -> None:
        if not self._num_held_pages:
            told, self._when_quiet = self._when_quiet, []
            for when_quiet in told:
                when_quiet()
