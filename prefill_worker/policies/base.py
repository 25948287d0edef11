"""Which queued request starts next."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from engine.kvcache.cache_manager import CacheManager
from prefill_worker.queue import QueuedRequest


class PrefillPolicy(ABC):
    """Orders requests of equal priority; the scheduler sees to priorities and to those overtaken too often."""

    @abstractmethod
    def order(self, queue: Sequence[QueuedRequest], cache: CacheManager) -> list[QueuedRequest]:
        """Returns the requests, first to start first. `queue` is in order of age."""
