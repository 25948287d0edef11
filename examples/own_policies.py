"""Policies of one's own, one of each kind, each an import path away (docs/extending.md):

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
    """Sends a session's requests to the workers that served it last, whose caches have its earlier turns, and others to
    those with the fewest requests. Of the sessions that anybody may make up it remembers the newest."""

    MAX_NUM_SESSIONS = 10_000

    def __init__(self) -> None:
        # Oldest use first.
        self._homes: dict[str, Pair] = {}

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        home = self._homes.get(request.session_id)
        if home in candidates:
            return home
        # As min() over the pairs by the sum of both, and in proportion to the workers instead of the pairs.
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
    """Computes short prompts before long ones, which wait no longer than the scheduler lets anybody be overtaken."""

    def order(self, queue: Sequence[QueuedRequest], cache: CacheManager) -> list[QueuedRequest]:
        return sorted(queue, key=lambda queued: len(queued.token_ids))


class SegmentedLru(EvictionPolicy):
    """Evicts pages that only one request has used before those that several have, so that a flood of prompts that never
    come again leaves the prefixes alone that many share; of equals, what was not used for longest."""

    def key(self, node: EvictableNode) -> tuple[float, ...]:
        return (min(node.num_hits, 1), node.last_access)
