"""Loads stored pages into the radix tree before their requests start."""

import bisect
import math
from collections.abc import Callable, Iterator, Sequence

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.pagestore.client.base import RegionCopies
from tandem.pagestore.client.load_rate import LoadRate
from tandem.pagestore.client.node_keys import NodeKeys
from tandem.pagestore.client.prefetch import Load, Prefetch
from tandem.pagestore.messages import DISK, HOST, PEER, EndFind, Find, Found, StoreClientMessage
from tandem.worker.page_tier import PrefetchKey, TierHits

# Finds under way at a time.
MAX_FINDS = 16
# Pages of a copy: it enters the tree in one turn, at 3 us a page.
MAX_LOAD_PAGES = 256
# Pages of a copy while the rate is not known.
PROBE_PAGES = 16
# Shares of the pool: loads hold at most one, and leave the other.
HELD_SHARE, RESERVED_SHARE = 1 / 4, 1 / 8
# Limit on the store's first answer, in seconds.
ANSWER_S = 1.0
# Poll interval for ended copies, and interval between attempts to get pages, in seconds.
POLL_S, RETRY_S = 0.0005, 0.005


class PageLoader:
    """Prefetches that are asked for, copied and entered.

    A load holds pool pages only while a copy runs, so it ends by itself and waits for nobody. A Find ends when no copy
    from its slots runs.
    """

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
        self._copies = copies
        self._keys = keys
        self._clock = clock
        self._compute_s = compute_s
        self._send = send
        self._max_held = max(1, int(cache.num_pages * HELD_SHARE))
        self._num_reserved = int(cache.num_pages * RESERVED_SHARE)
        self.rate = LoadRate()
        self._numbers = numbers
        self._is_open = False
        self._by_key: dict[PrefetchKey, Prefetch] = {}
        # To be hashed and asked for, in order.
        self._waiting: list[Prefetch] = []
        # By number of the Find.
        self._asked: dict[int, Prefetch] = {}
        self._following: list[Prefetch] = []
        self._loading: list[Prefetch] = []
        # Leaders by the keys that they asked for.
        self._coming: dict[bytes, Prefetch] = {}
        self._num_held = 0
        # End of the last copy, and lower bound of all deadlines.
        self._last_end = -math.inf
        self._first_deadline = math.inf

    @property
    def num_held_pages(self) -> int:
        """Pool pages that copies write."""
        return self._num_held

    def prefetch(self, key: PrefetchKey, token_ids: Sequence[int], namespace: str, priority: int) -> None:
        assert key not in self._by_key
        size = self._cache.page_size
        # At least one token is computed, for its logits.
        num_pages = (len(token_ids) - 1) // size
        if not self._is_open or num_pages <= 0:
            return
        _, num_cached = self._cache.find_cached(token_ids, namespace)
        if num_cached >= num_pages:
            return
        deadline = self._clock() + self._compute_s(num_cached * size, (num_pages - num_cached) * size)
        order = -priority, next(self._numbers)
        prefetch = Prefetch(key, token_ids, namespace, priority, order, deadline, num_pages)
        self._by_key[key] = prefetch
        self._first_deadline = min(self._first_deadline, deadline)
        self._wait(prefetch)

    def is_loading(self, key: PrefetchKey) -> bool:
        prefetch = self._by_key.get(key)
        if prefetch is None or self._clock() >= prefetch.deadline:
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
            self.rate.came(found.tiers[-1], len(found.slots), now - before)
        prefetch.answered_at = now
        prefetch.num_coming = found.num_coming
        is_continued = found.first == len(prefetch.slots) and len(found.slots) == len(found.tiers)
        if not is_continued or found.first + len(found.slots) + found.num_coming > len(prefetch.keys):
            self._finish(prefetch)
            return
        prefetch.slots += found.slots
        prefetch.tiers += found.tiers
        if prefetch.has_all or not self._still_gains(prefetch, now):
            self._finish(prefetch)

    def collect(self, mark: int) -> bool:
        """Enters the pages of ended copies into the tree. Returns whether there were any.

        Args:
            mark: of pages that the store has.
        """
        entered = False
        for prefetch in [p for p in self._loading if p.load is not None and p.load.completion.done()]:
            load, prefetch.load = prefetch.load, None
            assert load is not None
            self._loading.remove(prefetch)
            self._num_held -= load.end - load.first
            now = self._clock()
            self.rate.copied(load.end - load.first, now - max(load.began, self._last_end), now)
            self._last_end = now
            if load.may_enter:
                self._enter(prefetch, load, mark)
                entered = True
            self._cache.release_pages(load.handle)
            if prefetch.is_over:
                self._end_find(prefetch)
            elif prefetch.has_all:
                self._finish(prefetch)
        return entered

    def go_on(self, *, may_start: bool) -> None:
        """Asks for pages, and starts copies if allowed."""
        now = self._clock()
        if now >= self._first_deadline:
            self._expire(now)
        for prefetch in [p for p in self._asked.values() if p.answered_at is None and now >= p.asked_at + ANSWER_S]:
            self.rate.answered(now - prefetch.asked_at, now)
            self._finish(prefetch)
        self._unfollow()
        self._ask_waiting(now)
        if may_start:
            for prefetch in sorted(self._asked.values(), key=lambda p: p.order):
                if prefetch.load is None and not prefetch.is_over and now >= prefetch.retry_at:
                    self._start_load(prefetch, now)

    def next_deadline(self) -> float | None:
        now = self._clock()
        deadlines = [self._first_deadline] if self._by_key else []
        if self._loading:
            deadlines.append(now + POLL_S)
        if self._waiting and len(self._asked) < MAX_FINDS:
            deadlines.append(now)
        for prefetch in self._asked.values():
            if prefetch.answered_at is None:
                deadlines.append(prefetch.asked_at + ANSWER_S)
            elif prefetch.load is None and prefetch.num_entered < len(prefetch.slots):
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
            elif not self._follow(prefetch):
                if self._gains(prefetch, now):
                    self._ask(prefetch, now)
                else:
                    self._finish(prefetch)

    def _prepare(self, prefetch: Prefetch) -> bool:
        """Hashes the pages behind the cached prefix. Returns False if a later turn must go on."""
        cache, size = self._cache, self._cache.page_size
        node, num_cached = cache.find_cached(prefetch.token_ids, prefetch.namespace)
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
        rest = prefetch.token_ids[prefetch.base * size :]
        if not self._keys.extend(prefetch.keys, prefetch.before, rest, prefetch.num_pages - prefetch.base):
            return False
        del prefetch.keys[: num_cached - prefetch.base]
        prefetch.base = num_cached
        return True

    def _follow(self, prefetch: Prefetch) -> bool:
        """Waits for another prefetch that loads this one's next pages, if there is one."""
        leader = self._coming.get(prefetch.keys[0])
        if leader is None or leader.is_over:
            return False
        num_shared = next((i for i, k in enumerate(prefetch.keys) if self._coming.get(k) is not leader), None)
        shared_end = prefetch.base - leader.base + (len(prefetch.keys) if num_shared is None else num_shared)
        if leader.num_entered >= shared_end:
            return False
        prefetch.leader, prefetch.shared_end = leader, shared_end
        self._following.append(prefetch)
        return True

    def _unfollow(self) -> None:
        """Lets prefetches go on for themselves when their leader has loaded the shared pages, or ended."""
        for prefetch in list(self._following):
            leader = prefetch.leader
            assert leader is not None
            if leader.runs and leader.num_entered < prefetch.shared_end:
                continue
            end = leader.base + prefetch.shared_end
            prefetch.loaded |= {i: tier for i, tier in leader.loaded.items() if prefetch.base <= i < end}
            self._following.remove(prefetch)
            prefetch.restart()
            self._wait(prefetch)

    def _ask(self, prefetch: Prefetch, now: float) -> None:
        prefetch.find, prefetch.asked_at = next(self._numbers), now
        self._asked[prefetch.find] = prefetch
        self._coming.update(dict.fromkeys(prefetch.keys, prefetch))
        self._send(Find(prefetch.find, prefetch.namespace, tuple(prefetch.keys)))

    # --- Decisions ---

    def _gains(self, prefetch: Prefetch, now: float) -> bool:
        """Returns whether all pages would be loaded sooner than computed."""
        num_pages, size = len(prefetch.keys), self._cache.page_size
        load_s = self.rate.answer_s(now) + self.rate.copy_s(self._num_held + num_pages, now)
        return load_s < self._compute_s(prefetch.base * size, num_pages * size)

    def _still_gains(self, prefetch: Prefetch, now: float) -> bool:
        """Returns whether the pages found would still be loaded sooner than computed."""
        size = self._cache.page_size
        num_left = len(prefetch.slots) + prefetch.num_coming - prefetch.num_entered
        load_s = self.rate.copy_s(num_left, now)
        if prefetch.num_coming and prefetch.tiers and (page_s := self.rate.page_s(prefetch.tiers[-1])) is not None:
            load_s = max(load_s, page_s * prefetch.num_coming)
        return load_s < self._compute_s((prefetch.base + prefetch.num_entered) * size, num_left * size)

    # --- Copying ---

    def _start_load(self, prefetch: Prefetch, now: float) -> None:
        is_known = self.rate.is_known(now)
        limit = min(MAX_LOAD_PAGES, self._max_held - self._num_held)
        if not is_known:
            limit = 0 if self._loading else min(limit, PROBE_PAGES)
        first = prefetch.base + prefetch.num_entered
        end = min(first + limit, prefetch.base + len(prefetch.slots))
        if end <= first:
            return
        if not self._still_gains(prefetch, now):
            self._finish(prefetch)
            return
        cache, num_tokens = self._cache, end * self._cache.page_size
        handle = cache.acquire_pages(
            prefetch.token_ids[:num_tokens],
            num_tokens,
            max_cached_len=num_tokens,
            namespace=prefetch.namespace,
            priority=prefetch.priority,
            num_reserved=self._num_reserved,
        )
        if handle is None:
            prefetch.retry_at = now + RETRY_S
            return
        # The tree may have gained or lost pages since the Find.
        first = handle.num_shared
        if first < prefetch.base or first >= end:
            cache.release_pages(handle)
            prefetch.num_entered = end - prefetch.base
            if first < prefetch.base or prefetch.has_all:
                self._finish(prefetch)
            return
        if end - first > limit:
            # Pages loaded before were evicted meanwhile.
            cache.release_pages(handle)
            prefetch.num_entered = first - prefetch.base
            return
        slots = prefetch.slots[first - prefetch.base : end - prefetch.base]
        completion = self._copies.copy_in(slots, handle.page_ids[first:])
        self._num_held += end - first
        prefetch.load = Load(handle, first, end, completion, now)
        self._loading.append(prefetch)

    def _enter(self, prefetch: Prefetch, load: Load, mark: int) -> None:
        num_tokens = load.end * self._cache.page_size
        self._cache.cache_pages(load.handle, prefetch.token_ids[:num_tokens], num_tokens)
        node = load.handle.node
        for place in range(load.end - 1, load.first - 1, -1):
            node.store_key, node.store_mark = prefetch.keys[place - prefetch.base], mark
            prefetch.loaded[place] = prefetch.tiers[place - prefetch.base]
            assert node.parent is not None
            node = node.parent
        prefetch.num_entered = load.end - prefetch.base

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
            if prefetch in self._following:
                self._following.remove(prefetch)
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
        for key in prefetch.keys:
            if self._coming.get(key) is prefetch:
                del self._coming[key]

    def _abandon_all(self) -> None:
        for prefetch in self._loading:
            assert prefetch.load is not None
            prefetch.load.may_enter = False
        for prefetch in [*self._by_key.values(), *self._asked.values()]:
            self._finish(prefetch)
