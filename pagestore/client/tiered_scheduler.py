from dataclasses import replace

from tandem.messages import ResetCache, WorkerStats
from tandem.page_changes import PageChanges
from tandem.pagestore.client.events import StoreEvent
from tandem.worker.base import Scheduler
from tandem.worker.events import Event, FromRouter
from tandem.worker.page_tier import PageTier


class TieredScheduler(Scheduler):
    """A role's scheduler above a tier, which has its turn first."""

    def __init__(self, scheduler: Scheduler, tier: PageTier) -> None:
        self._scheduler = scheduler
        self._tier = tier

    def receive(self, event: Event) -> None:
        if isinstance(event, StoreEvent):
            self._tier.receive(event)
            return
        if isinstance(event, FromRouter) and isinstance(event.message, ResetCache):
            # Before the scheduler drops its pages: none of a running load may enter afterwards.
            self._tier.reset()
        self._scheduler.receive(event)

    def step(self) -> bool:
        has_loaded = self._tier.settle()
        worked = self._scheduler.step()
        return has_loaded or worked

    def next_deadline(self) -> float | None:
        deadlines = self._tier.next_deadline(), self._scheduler.next_deadline()
        return min((d for d in deadlines if d is not None), default=None)

    def stats(self) -> WorkerStats:
        return replace(self._scheduler.stats(), load_token_s=self._tier.load_token_s())

    def take_cache_changes(self) -> PageChanges | None:
        return self._scheduler.take_cache_changes()

    def check_integrity(self) -> str:
        return self._scheduler.check_integrity() or self._tier.check_integrity()
