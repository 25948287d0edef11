"""How prompts get the pages that they are computed into."""

from tandem.engine.kvcache.cache_manager import CacheManager, PageHandle
from tandem.engine.kvcache.page_ceiling import PageCeiling
from tandem.prefill_worker.queued_request import QueuedRequest


class PromptPages:
    """Locks pages for prompts, which ask in the order in which they may start. In a pool that nobody else takes pages
    from, who comes first waits for room and all others behind it: later ones that fit would keep it waiting for ever.

    Attributes:
        is_short: whether there is nothing for anybody else in this pass.
    """

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self.is_short = False

    def begin_pass(self) -> None:
        """Those that wait are about to ask, in order."""
        self.is_short = False

    def must_wait(self, queued: QueuedRequest) -> bool:
        """Whether there is nothing for this one in this pass, though there may be for others behind it."""
        return False

    def acquire(self, queued: QueuedRequest) -> PageHandle | None:
        """Locks pages for a whole prompt, if there are enough."""
        handle = self._lock(queued)
        self.is_short = handle is None
        return handle

    def _lock(
        self, queued: QueuedRequest, num_reserved: int = 0, ceiling: PageCeiling | None = None
    ) -> PageHandle | None:
        # At least one token is computed, to have logits, and all of them where theirs are asked for.
        return self._cache.acquire_pages(
            queued.token_ids,
            len(queued.token_ids),
            max_cached_len=0 if queued.computes_all else len(queued.token_ids) - 1,
            namespace=queued.request.cache_namespace,
            priority=queued.request.priority,
            num_reserved=num_reserved,
            ceiling=ceiling,
        )
