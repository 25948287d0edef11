"""Interface of prefill policies, which choose the next waiting request.

A custom policy derives from PrefillPolicy and is named by its import path, as in `--schedule mypackage.policies:Mine`.
Each worker creates one instance without arguments. Only the engine thread calls it.

Guarantees:
- `queue` has requests of one priority, the oldest first. A request keeps its age over all attempts.
- `queue` has at most 128 requests, however many wait: the oldest of the highest priorities.
- No request starves. After 64 later requests of its priority have started first, a request goes before all requests
that the policy orders and leaves `queue`.
- The policy is asked before every forward pass that has tokens to spare. Earlier answers do not bind it. Requests start
in its order while tokens and pages last. A request is skipped while another one computes its next pages. If a request
finds no pages, all later ones wait.

Requirements:
- Return each request of `queue` once. An omitted request does not start until it has been overtaken too often.
- Change neither the requests nor the cache. `cache.peek` returns a prompt's cached pages and counts as no access. Call
nothing else of the cache manager.
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
            queue: requests by age. `request` is the client's request, `token_ids` the prompt and the output of earlier
                attempts, `num_overtaken` the number of later requests started first.
            cache: the worker's cache. `peek(queued.token_ids, queued.request.cache_namespace)` returns the pages of the
                longest cached prefix.
        """
