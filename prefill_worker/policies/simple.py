import random
from collections.abc import Sequence

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.prefill_worker.policies.base import PrefillPolicy
from tandem.prefill_worker.queued_request import QueuedRequest


class FirstComeFirstServed(PrefillPolicy):
    def order(self, queue: Sequence[QueuedRequest], cache: CacheManager) -> list[QueuedRequest]:
        return list(queue)


class LongestOutputFirst(PrefillPolicy):
    """Largest max_tokens first, which shortens a batch's total time."""

    def order(self, queue: Sequence[QueuedRequest], cache: CacheManager) -> list[QueuedRequest]:
        return sorted(queue, key=lambda q: q.request.sampling.max_tokens - len(q.request.output_ids), reverse=True)


class RandomOrder(PrefillPolicy):
    """Random order with a fixed seed, as a baseline."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def order(self, queue: Sequence[QueuedRequest], cache: CacheManager) -> list[QueuedRequest]:
        return self._random.sample(list(queue), len(queue))
