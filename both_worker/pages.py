from tandem.decode_worker.scheduler import DecodeScheduler
from tandem.engine.kvcache.cache_manager import CacheManager, PageHandle
from tandem.engine.kvcache.page_ceiling import PageCeiling
from tandem.prefill_worker.pages import PromptPages
from tandem.prefill_worker.queued_request import QueuedRequest
from tandem.worker.kept_pages import KeptPages


class SharedPages(PromptPages):
    """Shares a pool between decoding requests, prompts decoded here and prompts bound for other workers.

    No request starves, whatever other workers do:
    - Prompts bound elsewhere hold pages until they get leases there. Together they leave the pages of one largest
    request free, so local decoding never waits for a lease elsewhere. Otherwise two workers of 10 pages that prefill 6
    for each other would each hold 4 useless pages.
    - A prompt waits for older queued leases, whose senders hold pages already. Younger leases overtake it a bounded
    number of times.
    - A prompt that waits for the ceiling of prompts bound elsewhere blocks no local one.
    - A moving stream takes back the pages that it gave back, before all others.

    Attributes:
        bound_elsewhere: ceiling of the prompts bound for other workers.
    """

    def __init__(self, cache: CacheManager, decode: DecodeScheduler, worker_id: str, kept: KeptPages) -> None:
        """
        Args:
            kept: pages of streams that were given back to move.
        """
        super().__init__(cache)
        self._decode = decode
        self._worker_id = worker_id
        self._kept = kept
        self.bound_elsewhere = PageCeiling(cache.num_pages - cache.max_request_pages)
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
        is_move = queued.request.is_move
        if first_lease is not None and first_lease < place and not is_move:
            self.is_short = True
            return None
        goes_elsewhere = self._goes_elsewhere(queued)
        ceiling = self.bound_elsewhere if goes_elsewhere else None
        # Reserve growth of running requests: otherwise a new request is given back for it.
        num_reserved = 0 if is_move else self._decode.num_reserved
        handle = self._lock(queued, num_reserved=num_reserved, ceiling=ceiling)
        if handle is not None:
            self._has_started = True
            if is_move:
                self._kept.let_go(queued.request.request_id)
        elif goes_elsewhere and not self.bound_elsewhere.fits((), self._cache.num_pages_for(len(queued.token_ids))):
            self._is_ceiling_reached = True
        else:
            self.is_short = True
            self._first_waiting = place
        return handle

    def tell_leases(self) -> None:
        """Tells the lease queue which prompts wait."""
        self._decode.leases.note_prompts(self._first_waiting, has_started=self._has_started)
        self._has_started = False

    def _goes_elsewhere(self, queued: QueuedRequest) -> bool:
        request = queued.request
        # A prompt to embed waits for no other worker.
        return request.embedding is None and request.decode_worker_id != self._worker_id
