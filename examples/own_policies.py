"""User-defined policies, one of each kind, loaded by import path (docs/extending.md):

    PYTHONPATH=examples tandem serve --model smollm2-135m-instruct --prefill 1 --decode 2 \\
        --routing own_policies:StickySessions --schedule own_policies:ShortestPromptFirst \\
        --eviction own_policies:SegmentedLru
"""

from collections.abc import Sequence

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.kvcache.eviction.base import EvictableNode, EvictionPolicy
from tandem.prefill_worker.policies.base import PrefillPolicy
from tandem.prefill_worker.queued_request import QueuedRequest
from tandem.router.policies.base import RoutingPolicy, RoutingRequest
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.worker import Pair, Worker


class StickySessions(RoutingPolicy):
    """Sends a session to the workers that served it last and cached its earlier turns, others to the least loaded.

    Remembers only the newest sessions, because clients may make up any number.
    """

    MAX_NUM_SESSIONS = 10_000

    def __init__(self) -> None:
        # Oldest use first.
        self._homes: dict[str, Pair] = {}

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        home = self._homes.get(request.session_id)
        if home in candidates:
            return home
        # Like min() over all pairs by the sum of both, at a cost per worker instead of per pair.
        return candidates.least(lambda worker: worker.num_assigned, lambda worker: worker.num_assigned)

    def attempt_started(self, pair: Pair, request: RoutingRequest) -> None:
        if request.session_id:
            self._homes.pop(request.session_id, None)
            self._homes[request.session_id] = pair
            if len(self._homes) > self.MAX_NUM_SESSIONS:
                del self._homes[next(iter(self._homes))]

    def worker_lost(self, worker: Worker, reason: str) -> None:
        self._homes = {s: pair for s, pair in self._homes.items() if worker not in (pair.prefill, pair.decode)}


class ShortestPromptFirst(PrefillPolicy):
    """Computes short prompts first; the scheduler limits how long other prompts are overtaken."""

    def order(self, queue: Sequence[QueuedRequest], cache: CacheManager) -> list[QueuedRequest]:
        return sorted(queue, key=lambda queued: len(queued.token_ids))


class SegmentedLru(EvictionPolicy):
    """Evicts pages that one request used before pages that several used, and among equals the least recently used.

    A flood of unique prompts then leaves common prefixes cached.
    """

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (min(node.num_hits, 1), node.last_access)
