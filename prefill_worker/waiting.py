"""Requests waiting for prefill, and their start order."""

import bisect
import itertools
from collections.abc import Callable

from tandem.engine.grammars import Constraint
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.messages import Prefill, TierHits
from tandem.prefill_worker.policies.base import PrefillPolicy
from tandem.prefill_worker.queued_request import QueuedRequest
from tandem.request_ids import router_of
from tandem.worker.adapter_uses import NO_USE, AdapterUse
from tandem.worker.page_tier import NoTier, PageTier
from tandem.worker.prefetches import Prefetches

# Requests that a policy sees: bounds a step's work.
POLICY_WINDOW = 128
# Later requests of the same priority started before a request. At the limit, and on every later attempt, it goes first.
MAX_OVERTAKEN = 64


class WaitingRequests:
    """The queue. It prefetches stored pages for its front, so that they are in the pool when their turn comes.

    Attributes:
        is_loading: whether stored pages were still coming for a request of the last start order whose turn came.
        waits_for_slot: whether a request of the last start order waits for a slot of its adapter.
        num_tokens: of all waiting requests, cached or not.
    """

    def __init__(
        self,
        cache: CacheManager,
        policy: PrefillPolicy,
        tier: PageTier | None = None,
        is_in_work: Callable[[QueuedRequest], bool] = lambda _: False,
    ) -> None:
        """
        Args:
            tier: None without a page store.
            is_in_work: whether a started job computes a request's next pages. They are not prefetched meanwhile.
        """
        self._is_in_work = is_in_work
        self._cache = cache
        self._policy = policy
        self._prefetches = Prefetches(tier or NoTier(), "prefill")
        self._requests: list[QueuedRequest] = []
        # Their grammars are being compiled, or their adapters loaded. Kept apart, so that they do not fill the policy's
        # window.
        self._preparing: list[QueuedRequest] = []
        self._numbers = itertools.count()
        self.is_loading = False
        self.waits_for_slot = False
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests) + len(self._preparing)

    @property
    def is_compiling(self) -> bool:
        """Whether a request may become ready without an event."""
        return any(queued.constraint is not None for queued in self._preparing)

    @property
    def waits_for_adapter(self) -> bool:
        return self.waits_for_slot or bool(self._preparing)

    def enqueue(
        self,
        request: Prefill,
        constraint: Constraint | None = None,
        received_ns: int = 0,
        adapter: AdapterUse = NO_USE,
    ) -> None:
        """Inserts a request by its age over all attempts and its priority."""
        token_ids = [*request.prompt_ids, *request.output_ids]
        num_overtaken = MAX_OVERTAKEN if request.attempt else 0
        queued = QueuedRequest(
            request,
            next(self._numbers),
            token_ids,
            self._cache.page_size,
            constraint,
            received_ns,
            num_overtaken,
            # Nearly all pages of a moving stream are in the pool.
            is_prefetched=request.is_move,
            adapter=adapter,
        )
        place = len(self._requests)
        self.num_tokens += len(token_ids)
        if queued.is_preparing:
            self._preparing.append(queued)
        else:
            place = bisect.bisect_right(self._requests, queued.queue_key, key=lambda q: q.queue_key)
            self._requests.insert(place, queued)
        if place < POLICY_WINDOW:
            self._look_ahead()

    def must_wait_for_load(self, queued: QueuedRequest) -> bool:
        """Returns whether a request whose turn has come waits for its stored pages: not after more requests have
        overtaken it than may."""
        if not self._prefetches.has_store or queued.request.is_move:
            return False
        if not queued.is_prefetched:
            self._prefetch(queued)
        is_loading = queued.num_overtaken <= MAX_OVERTAKEN and self._prefetches.is_loading(queued.key)
        self.is_loading = self.is_loading or is_loading
        return is_loading

    def _look_ahead(self) -> None:
        """Prefetches for the first requests, until they need half of the available pages: the loads of a long queue
        would evict each other."""
        if not self._prefetches.has_store:
            return
        num_left = self._cache.num_available_pages // 2
        for queued in itertools.islice(itertools.chain(self._requests, self._preparing), POLICY_WINDOW):
            if not queued.is_prefetched and not self._is_in_work(queued):
                self._prefetch(queued)
            num_left -= queued.num_full_pages
            if num_left <= 0:
                break

    def _prefetch(self, queued: QueuedRequest) -> None:
        queued.is_prefetched = True
        if not queued.computes_all:
            request = queued.request
            self._prefetches.begin(queued.key, queued.token_ids, request.cache_namespace, request.priority)

    def _admit_prepared(self) -> None:
        ready = [queued for queued in self._preparing if not queued.is_preparing]
        if ready:
            self._preparing = [queued for queued in self._preparing if queued.is_preparing]
            for queued in ready:
                bisect.insort(self._requests, queued, key=lambda q: q.queue_key)

    def moves(self) -> list[QueuedRequest]:
        """Returns moving streams, which start before everything else."""
        self._admit_prepared()
        return list(itertools.takewhile(lambda q: q.request.is_move, self._requests))

    def start_order(self) -> list[QueuedRequest]:
        """Returns the start order: by priority, then those overtaken too often, then by the policy. Before all goes a
        request that has outwaited every larger priority's head start."""
        self.is_loading = False
        self._admit_prepared()
        self._look_ahead()
        num_moves = len(self.moves())
        window = self._window(num_moves)
        highest = max((q.request.priority for q in window), default=0)
        # They stand before every larger priority in the queue.
        ordered = list(itertools.takewhile(lambda q: q.request.priority < highest, window))
        rest = sorted(window[len(ordered) :], key=lambda q: -q.request.priority)
        for _, group in itertools.groupby(rest, key=lambda q: q.request.priority):
            equals = list(group)
            overtaken = [q for q in equals if q.num_overtaken >= MAX_OVERTAKEN]
            others = [q for q in equals if q.num_overtaken < MAX_OVERTAKEN]
            ordered += overtaken + self._policy.order(others, self._cache)
        return ordered

    def _window(self, num_moves: int) -> list[QueuedRequest]:
        """Returns the requests that the policy sees, without those whose adapter has no turn at the slots."""
        self.waits_for_slot = False
        window: list[QueuedRequest] = []
        for queued in itertools.islice(self._requests, num_moves, None):
            if queued.adapter is NO_USE or queued.adapter.has_turn:
                window.append(queued)
                if len(window) == POLICY_WINDOW:
                    break
            else:
                self.waits_for_slot = True
        return window

    def dequeue(self, queued: QueuedRequest) -> TierHits:
        """Removes a request that starts, and counts those it overtakes. Returns its prefetch's hits."""
        self._requests.remove(queued)
        self.num_tokens -= len(queued.token_ids)
        for other in self._requests:
            if other.queue_key > queued.queue_key:
                break
            if other.request.priority == queued.request.priority:
                other.num_overtaken += 1
        return self._prefetches.end(queued.key)

    def drop(self, queued: QueuedRequest) -> None:
        """Removes a request that does not start here."""
        queued.adapter.end()
        (self._preparing if queued in self._preparing else self._requests).remove(queued)
        self.num_tokens -= len(queued.token_ids)
        self._prefetches.end(queued.key)

    def drop_attempt(self, request_id: str, attempt: int) -> bool:
        """Removes an attempt. Returns whether it was waiting."""
        waiting = itertools.chain(self._requests, self._preparing)
        found = next((q for q in waiting if q.key == (request_id, attempt)), None)
        if found is not None:
            self.drop(found)
        return found is not None

    def drop_all_of(self, router: str) -> None:
        for queued in [*self._requests, *self._preparing]:
            if router_of(queued.request.request_id) == router:
                self.drop(queued)
