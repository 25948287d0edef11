"""How prompts get their pages where the same pool is decoded from."""

from tandem.decode_worker.scheduler import DecodeScheduler
from tandem.engine.kvcache.cache_manager import CacheManager, PageHandle
from tandem.engine.kvcache.page_ceiling import PageCeiling
from tandem.prefill_worker.pages import PromptPages
from tandem.prefill_worker.queued_request import QueuedRequest


class SharedPages(PromptPages):
    """Shares a pool out between prompts that are decoded at other workers, prompts that are decoded here, and what is
    decoded here. Nobody waits for ever, whatever others do:

    - Prompts bound for other workers keep their pages until they get leases there. All of them together leave as many
      pages as the largest request takes, so nothing that is decoded here waits for a lease elsewhere. (Two workers of
      10 pages that each prefill 6 for the other would hold 4 each that are of no use to anybody.)
    - A prompt waits for the leases in line that are older than it, whose senders hold pages elsewhere. Older ones among
      the prompts are overtaken by leases as often as leases by each other, and then go first.
    - A prompt that waits only because others are bound for other workers holds up none that is decoded here.
    """

    def __init__(self, cache: CacheManager, decode: DecodeScheduler, worker_id: str) -> None:
        """Args: worker_id: who is to decode what is decoded here."""
        super().__init__(cache)
        self._decode = decode
        self._worker_id = worker_id
        self._bound_elsewhere = PageCeiling(cache.num_pages - cache.max_request_pages)
        self._is_ceiling_reached = False
        self._first_waiting: int | None = None
        self._has_started = False

    def begin_pass(self) -> None:
        super().begin_pass()
        self._is_ceiling_reached = False
        self._first_waiting = None

    def must_wait(self, queued: QueuedRequest) -> bool:
        return self._is_ceiling_reached and self._goes_elsewhere(queued)

    def acquire(self, queued: QueuedRequest) -> PageHandle | None:
        place, _ = queued.queue_key
        first_lease = self._decode.leases.first_waiting_place
        if first_lease is not None and first_lease < place:
            self.is_short = True
            return None
        goes_elsewhere = self._goes_elsewhere(queued)
        ceiling = self._bound_elsewhere if goes_elsewhere else None
        # What runs grows first, or what is admitted now would be given back for it and come again.
        handle = self._lock(queued, num_reserved=self._decode.num_running, ceiling=ceiling)
        if handle is not None:
            self._has_started = True
        elif goes_elsewhere and not self._bound_elsewhere.fits((), self._cache.num_pages_for(len(queued.token_ids))):
            self._is_ceiling_reached = True
        else:
            self.is_short = True
            self._first_waiting = place
        return handle

    def tell_leases(self) -> None:
        """Tells those who wait for leases which prompts wait beside them."""
        self._decode.leases.note_prompts(self._first_waiting, has_started=self._has_started)
        self._has_started = False

    def _goes_elsewhere(self, queued: QueuedRequest) -> bool:
        return queued.request.decode_worker_id != self._worker_id
