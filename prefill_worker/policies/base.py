"""Interface of prefill policies, which choose the next waiting request.

A custom policy derives from PrefillPolicy and is named as in `--schedule mypackage.policies:Mine`. Each worker creates
one instance without arguments, and only its engine thread calls it.

Guarantees:
- `queue` has requests of one priority, the oldest first. A request keeps its age over all attempts.
- `queue` has at most 128 requests, however many wait.
- No request starves: after 64 later requests have started first, it goes before all others and leaves `queue`.
- The policy is asked before every forward pass with tokens to spare; earlier answers do not bind it. Requests start in
its order while tokens and pages last. A request is skipped while another computes its next pages, and
while its stored pages are loaded. If one finds no pages, all later ones wait.

Requirements:
- Return each request of `queue` once. An omitted request starts only after it was overtaken too often.
- Change neither the requests nor the cache. Of the cache manager, call only `peek`, which counts as no access.
- Be deterministic: seed random choices, so that runs can be repeated.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.prefill_worker.queued_request import QueuedRequest


class PrefillPolicy(ABC):
    """Orders requests of equal priority."""

    @abstractmethod
    def order(self, queue: Sequence[QueuedRequest], cache: CacheManager) -> list[QueuedRequest]:
        """Returns the requests in start order.

        Args:
            queue: requests by age. `token_ids` has the prompt and the output of earlier attempts, `num_overtaken` the
                number of later requests started first.
            cache: the worker's cache. `peek(queued.token_ids, queued.request.cache_namespace)` returns the pages of the
                longest cached prefix.
        """
