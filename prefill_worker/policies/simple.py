"""Policies that look at each request by itself."""

import random
from collections.abc import Sequence

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.prefill_worker.policies.base import PrefillPolicy
from tandem.prefill_worker.queued_request import QueuedRequest


class FirstComeFirstServed(PrefillPolicy):
    def order(self, queue: Sequence[QueuedRequest], cache: CacheManager) -> list[QueuedRequest]:
        return list(queue)


class LongestOutputFirst(PrefillPolicy):
    """The largest max_tokens first: what occupies decode longest begins soonest, which shortens a batch's end."""

    def order(self, queue: Sequence[QueuedRequest], cache: CacheManager) -> list[QueuedRequest]:
        return sorted(queue, key=lambda q: q.request.sampling.max_tokens - len(q.request.output_ids), reverse=True)


class RandomOrder(PrefillPolicy):
    """The baseline for the others; the same sequence of orders in every run."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def order(self, queue: Sequence[QueuedRequest], cache: CacheManager) -> list[QueuedRequest]:
        return self._random.sample(list(queue), len(queue))
