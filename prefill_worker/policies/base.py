"""What a prefill policy is: it says which waiting request starts next.

A policy of your own derives from PrefillPolicy and is named by where it is, as in `--schedule mypackage.policies:Mine`.
It is made once for each worker, without arguments, and called by the worker's engine thread alone.

It may rely on this:

- `queue` holds requests of one priority, the oldest first. A request keeps its age over all attempts.
- It is never longer than 128: of all that wait, those of larger priority and then the oldest. So its work at each step
  does not grow with the queue, however long that gets.
- Nobody starves by its choice. Who was overtaken 64 times by later requests of the same priority goes before all that a
  policy orders, and is not in `queue` any more.
- It is asked again before every forward that has tokens to spare, and is bound by none of its earlier answers. Its
  order is followed from the first on, as far as tokens and pages reach. A request whose next pages another one is
  computing is passed over; at the first that finds no pages all wait.

And it should keep to this:

- It returns each request of `queue` once. Who is left out is not started, until it has been overtaken too often.
- It changes neither the requests nor the cache. `cache.peek` finds what is cached of a prompt and counts as no access;
  all else of the cache manager is not for a policy.
- The same calls in the same order give the same answers: what is drawn at random has a seed. Otherwise no run can be
  repeated.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.prefill_worker.queued_request import QueuedRequest


class PrefillPolicy(ABC):
    """Orders requests of equal priority."""

    @abstractmethod
    def order(self, queue: Sequence[QueuedRequest], cache: CacheManager) -> list[QueuedRequest]:
        """Returns the requests, first to start first.

        Args:
            queue: in order of age. `request` has what the client asked for, `token_ids` its prompt and what earlier
                attempts have put out, `num_overtaken` how often a later one went first.
            cache: what this worker has computed, for `peek(queued.token_ids, queued.request.cache_namespace)`: the
                pages of the longest cached prefix.
        """
