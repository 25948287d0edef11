"""Role `both`: prefill and decode in one worker, over one engine and one pool."""

from decode_worker.scheduler import DecodeScheduler
from engine.base import EngineBase
from engine.kvcache.cache_manager import CacheManager
from prefill_worker.scheduler import PrefillScheduler
from tandem.messages import WorkerStats
from worker.base import Scheduler
from worker.events import Event
from worker.stats import worker_stats


class BothScheduler(Scheduler):
    """Alternates a prefill and a decode scheduler that share one cache: one forward of each a turn. Prefills overlap
    while nothing is decoded."""

    def __init__(
        self, engine: EngineBase, cache: CacheManager, prefill: PrefillScheduler, decode: DecodeScheduler
    ) -> None:
        """Args: engine, cache: those of both schedulers."""
        self._engine = engine
        self._cache = cache
        self._prefill = prefill
        self._decode = decode

    def receive(self, event: Event) -> None:
        self._prefill.receive(event)
        self._decode.receive(event)

    def step(self) -> bool:
        prefilled = self._prefill.step()
        if self._decode.num_running:
            if prefilled:
                # The decode step in flight ends before the prefill behind it: its tokens have waited for the launch of
                # that, and do not wait for its end.
                self._decode.collect_launched()
            # The next decode step would run behind the prefill in flight anyway: what that prefill gives goes on with
            # this step, not with the one after.
            self._prefill.collect_launched()
        decoded = self._decode.step()
        return prefilled or decoded

    def next_deadline(self) -> float | None:
        deadlines = (self._prefill.next_deadline(), self._decode.next_deadline())
        return min((d for d in deadlines if d is not None), default=None)

    def stats(self) -> WorkerStats:
        return worker_stats(self._engine, self._cache, self._prefill.own_stats(), self._decode.own_stats())

    def check_integrity(self) -> str:
        return self._cache.check_integrity()
