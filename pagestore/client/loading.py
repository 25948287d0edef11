"""Loads stored pages into the radix tree before their requests start."""

import bisect
import math
from collections.abc import Callable, Iterator, Sequence

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.pagestore.client.base import RegionCopies
from tandem.pagestore.client.load_copies import LoadCopies
from tandem.pagestore.client.load_rate import LoadRate
from tandem.pagestore.client.node_keys import NodeKeys
from tandem.pagestore.client.prefetch import Prefetch
from tandem.pagestore.client.shared_loads import SharedLoads
from tandem.pagestore.messages import DISK, HOST, PEER, EndFind, Find, Found, StoreClientMessage
from tandem.worker.page_tier import PrefetchKey, TierHits

# Finds under way at a time.
MAX_FINDS = 16
# Limit on a prompt's wait while nothing says how long computing takes, in seconds: the disk may be slow.
UNKNOWN_S = 5.0
# Limits on the store's first answer to a Find, and on each next one, in seconds. The store ends a Find whose next page
# does not come within 10 s, and says so: one that is silent for longer stands still.
ANSWER_S, NEXT_ANSWER_S = 1.0, 12.0
# Poll interval for ended copies, in seconds.
POLL_S = 0.0005


class PageLoader:
    """Prefetches, from the question whether they gain to their end. A Find ends when no copy from its slots runs."""

    def __init__(
        self,
        cache: CacheManager,
        copies: RegionCopies,
        keys: NodeKeys,
        clock: Callable[[], float],
        compute_s: Callable[[int, int], float],
        numbers: Iterator[int],
        send: Callable[[StoreClientMessage], None],
    ) -> None:
        """
        Args:
            compute_s: expected seconds until given numbers of cached tokens and of tokens to compute are computed.
            numbers: of Finds, unique in the tier.
        """
        self._cache = cache
        self._keys = keys
        self._clock = clock
        self._compute_s = compute_s
        self._send = send
        self.rate = LoadRate()
        self._copies = LoadCopies(cache, copies, self.rate, clock)
        self._numbers = numbers
        self._is_open = False
        self._by_key: dict[PrefetchKey, Prefetch] = {}
        # To be hashed and asked for, in order.
        self._waiting: list[Prefetch] = []
        # By number of the Find.
        self._asked: dict[int, Prefetch] = {}
        self._shared = SharedLoads()
        # Lower bound of all deadlines.
        self._first_deadline = math.inf

    @property
    def num_held_pages(self) -> int:
        """Pool pages that copies write."""
        return self._copies.num_held

    def prefetch(self, key: PrefetchKey, token_ids: Sequence[int], namespace: str, priority: int) -> None:
        assert key not in self._by_key
        size = self._cache.page_size
        # At least one token is computed, for its logits.
        num_pages = (len(token_ids) - 1) // size
        if not self._is_open or num_pages <= 0:
            return
        cached = self._cache.find_cached(token_ids, namespace)
        if cached.num_pages >= num_pages:
            return
        num_left = num_pages - cached.num_pages
        now, compute_s = self._clock(), self._compute_s(cached.num_pages * size, num_left * size)
        deadline = now + compute_s
        waits_until = deadline if math.isfinite(deadline) else now + UNKNOWN_S
        order = -priority, next(self._numbers)
        prefetch = Prefetch(key, token_ids, namespace, priority, order, deadline, waits_until, num_pages, cached)
        self._by_key[key] = prefetch
        self._first_deadline = min(self._first_deadline, deadline)
        self._wait(prefetch)

    def is_loading(self, key: PrefetchKey) -> bool:
        prefetch = self._by_key.get(key)
        if prefetch is None or self._clock() >= prefetch.waits_until:
            return False
        return not prefetch.is_over or (prefetch.load is not None and prefetch.load.may_enter)

    def end(self, key: PrefetchKey) -> TierHits:
        prefetch = self._by_key.pop(key, None)
        if prefetch is None:
            return TierHits()
        self._finish(prefetch)
        size = self._cache.page_size
        return TierHits(*(prefetch.num_loaded(tier) * size for tier in (HOST, DISK, PEER)))

    def open(self) -> None:
        """Begins a session."""
        self._is_open = True

    def close(self) -> None:
        """Ends a session with all its Finds. Running copies go on, but their pages do not enter the tree."""
        self._is_open = False
        for prefetch in list(self._asked.values()):
            self._forget_find(prefetch)
        self._abandon_all()

    def reset(self) -> None:
        """Ends all prefetches. Nothing that was found before enters the tree."""
        self._abandon_all()

    def check_integrity(self) -> str:
        """Returns the first violation of the accounting of finds and loads, or ""."""
        if any(prefetch.find != number for number, prefetch in self._asked.items()):
            return "a find's number is not that of its prefetch"
        if any(p.is_over and p.load is None for p in self._asked.values()):
            return "a prefetch without a copy is over, but its find is not"
        if any(p.is_over or p.runs for p in self._waiting):
            return "a prefetch that waits is over, or has a find"
        return self._copies.check_integrity() or self._shared.check_integrity()

    def receive(self, found: Found) -> None:
        prefetch = self._asked.get(found.number)
        if prefetch is None or prefetch.is_over:
            # It was ended: the store unpins its pages with the EndFind on the way.
            return
        now = self._clock()
        before = prefetch.answered_at
        if before is None:
            self.rate.answered(now - prefetch.asked_at, now)
        elif found.tiers and found.tiers[-1] != HOST:
            is_first = found.tiers[-1] not in prefetch.tiers
            self.rate.came(found.tiers[-1], len(found.slots), now - before, now, is_first=is_first)
        prefetch.answered_at = now
        prefetch.num_coming, prefetch.is_asking = found.num_coming, found.is_asking
        is_continued = found.first == len(prefetch.slots) and len(found.slots) == len(found.tiers)
        if not is_continued or found.first + len(found.slots) + found.num_coming > len(prefetch.keys):
            self._finish(prefetch)
            return
        prefetch.slots += found.slots
        prefetch.tiers += found.tiers
        # While other nodes are asked, there may be more to gain than what is known.
        if prefetch.has_all or not (prefetch.is_asking or self._still_gains(prefetch, now)):
            self._finish(prefetch)

    def collect(self, mark: int) -> bool:
        """Enters the pages of ended copies into the tree. Returns whether there were any.

        Args:
            mark: of pages that the store has.
        """
        ended = self._copies.collect(mark)
        for prefetch in ended:
            if prefetch.is_over:
                self._end_find(prefetch)
            elif prefetch.has_all:
                self._finish(prefetch)
        return bool(ended)

    def go_on(self, *, may_start: bool) -> None:
        """Asks for pages, and starts a copy if allowed."""
        self._copies.begin_turn()
        now = self._clock()
        if now >= self._first_deadline:
            self._expire(now)
        for prefetch in [p for p in self._asked.values() if now >= _answer_deadline(p)]:
            if prefetch.answered_at is None:
                self.rate.answered(now - prefetch.asked_at, now)
            self._finish(prefetch)
        for prefetch in self._shared.take_free():
            self._wait(prefetch)
        self._ask_waiting(now)
        if may_start:
            for prefetch in sorted(self._asked.values(), key=lambda p: p.order):
                if prefetch.load is None and not prefetch.is_over and now >= prefetch.retry_at:
                    self._start_load(prefetch, now)

    def next_deadline(self) -> float | None:
        now = self._clock()
        deadlines = [self._first_deadline] if self._by_key else []
        if self._copies.is_running:
            deadlines.append(now + POLL_S)
        if self._waiting and len(self._asked) < MAX_FINDS:
            deadlines.append(now)
        for prefetch in self._asked.values():
            deadlines.append(_answer_deadline(prefetch))
            if prefetch.load is None and prefetch.num_entered < len(prefetch.slots):
                deadlines.append(max(now + POLL_S, prefetch.retry_at))
        return min(deadlines, default=None)

    # --- Beginning ---

    def _wait(self, prefetch: Prefetch) -> None:
        bisect.insort(self._waiting, prefetch, key=lambda p: p.order)

    def _ask_waiting(self, now: float) -> None:
        while self._waiting and len(self._asked) < MAX_FINDS and self._prepare(self._waiting[0]):
            prefetch = self._waiting.pop(0)
            if not prefetch.keys:
                self._finish(prefetch)
            elif not self._shared.follow(prefetch):
                if self._gains(prefetch, now):
                    self._ask(prefetch, now)
                else:
                    self._finish(prefetch)

    def _prepare(self, prefetch: Prefetch) -> bool:
        """Hashes the pages behind the cached prefix. Returns False if a later turn must go on."""
        prefetch.cached = self._cache.find_cached(prefetch.token_ids, prefetch.namespace, prefetch.cached)
        node, num_cached = prefetch.cached
        if num_cached >= prefetch.num_pages:
            prefetch.keys = []
            return True
        if num_cached < prefetch.base:
            # Pages of the prefix were evicted meanwhile.
            prefetch.restart()
        if prefetch.before is None:
            prefetch.base = num_cached
            prefetch.before = self._keys.root(prefetch.namespace) if node is None else self._keys.of(node)
            if prefetch.before is None:
                return False
        is_hashed = self._keys.extend(
            prefetch.keys, prefetch.before, prefetch.token_ids, prefetch.base, prefetch.num_pages
        )
        if not is_hashed:
            return False
        del prefetch.keys[: num_cached - prefetch.base]
        prefetch.base = num_cached
        return True

    def _ask(self, prefetch: Prefetch, now: float) -> None:
        prefetch.find, prefetch.asked_at = next(self._numbers), now
        self._asked[prefetch.find] = prefetch
        self._shared.lead(prefetch)
        self._send(Find(prefetch.find, prefetch.namespace, tuple(prefetch.keys)))

    # --- Decisions ---

    def _gains(self, prefetch: Prefetch, now: float) -> bool:
        """Returns whether all pages would be loaded sooner than computed."""
        num_pages, size = len(prefetch.keys), self._cache.page_size
        load_s = self.rate.answer_s(now) + self.rate.copy_s(self.num_held_pages + num_pages, now)
        return load_s < self._compute_s(prefetch.base * size, num_pages * size)

    def _still_gains(self, prefetch: Prefetch, now: float) -> bool:
        """Returns whether the pages found would still be loaded sooner than computed."""
        size = self._cache.page_size
        num_left = len(prefetch.slots) + prefetch.num_coming - prefetch.num_entered
        load_s = self.rate.copy_s(num_left, now)
        if prefetch.tiers:
            load_s = max(load_s, self.rate.coming_s(prefetch.tiers[-1], prefetch.num_coming, now))
        return load_s < self._compute_s((prefetch.base + prefetch.num_entered) * size, num_left * size)

    def _start_load(self, prefetch: Prefetch, now: float) -> None:
        if prefetch.num_entered >= len(prefetch.slots):
            return
        if not self._still_gains(prefetch, now) or not self._copies.start(prefetch, now) or prefetch.has_all:
            self._finish(prefetch)

    # --- Ending ---

    def _expire(self, now: float) -> None:
        for prefetch in self._by_key.values():
            if now >= prefetch.deadline and not prefetch.is_over:
                self._finish(prefetch)
        live = (p.deadline for p in self._by_key.values() if not p.is_over)
        self._first_deadline = min(live, default=math.inf)

    def _finish(self, prefetch: Prefetch) -> None:
        """Every end of a prefetch goes through this method. A running copy goes on."""
        if not prefetch.is_over:
            prefetch.is_over = True
            if prefetch in self._waiting:
                self._waiting.remove(prefetch)
            self._shared.end_follow(prefetch)
            self._end_find(prefetch)

    def _end_find(self, prefetch: Prefetch) -> None:
        """Ends a Find, if there is one and no copy from its slots runs."""
        if prefetch.find is not None and prefetch.load is None:
            self._send(EndFind(prefetch.find))
            self._forget_find(prefetch)

    def _forget_find(self, prefetch: Prefetch) -> None:
        assert prefetch.find is not None
        del self._asked[prefetch.find]
        prefetch.find = None
        self._shared.end_lead(prefetch)

    def _abandon_all(self) -> None:
        self._copies.abandon()
        for prefetch in [*self._by_key.values(), *self._asked.values()]:
            self._finish(prefetch)


def _answer_deadline(prefetch: Prefetch) -> float:
    """Returns the time by which the store must answer; infinite if nothing more is expected."""
    if prefetch.is_over:
        return math.inf
    if prefetch.answered_at is None:
        return prefetch.asked_at + ANSWER_S
    return prefetch.answered_at + NEXT_ANSWER_S if prefetch.expects_answer else math.inf
