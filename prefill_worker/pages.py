from tandem.engine.kvcache.cache_manager import CacheManager, PageHandle
from tandem.engine.kvcache.page_ceiling import PageCeiling
from tandem.prefill_worker.queued_request import QueuedRequest


class PromptPages:
    """Locks pages for prompts, which ask in start order.

    If one does not fit, all behind it wait: smaller ones would starve it.

    Attributes:
        is_short: whether no other prompt can get pages in this pass.
    """

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self.is_short = False

    def begin_pass(self) -> None:
        """Starts a pass over the waiting prompts, in order."""
        self.is_short = False

    def must_wait(self, queued: QueuedRequest) -> bool:
        """Returns whether this prompt, but maybe not later ones, has no pages in this pass."""
        return False

    def acquire(self, queued: QueuedRequest) -> PageHandle | None:
        """Locks pages for a whole prompt; None if there are too few."""
        handle = self._lock(queued)
        self.is_short = handle is None
        return handle

    def _lock(
        self, queued: QueuedRequest, num_reserved: int = 0, ceiling: PageCeiling | None = None
    ) -> PageHandle | None:
        # Compute at least one token, for its logits; all for prompt log probabilities.
        return self._cache.acquire_pages(
            queued.token_ids,
            len(queued.token_ids),
            max_cached_len=0 if queued.computes_all else len(queued.token_ids) - 1,
            namespace=queued.request.cache_namespace,
            priority=queued.request.priority,
            num_reserved=num_reserved,
            ceiling=ceiling,
        )
