"""The pair that has least left to do for this very request."""

from collections.abc import Sequence

from router.policies.base import Prompt, RoutingPolicy
from router.prefix_index import PrefixIndex
from router.worker_registry import Pair, Worker
from tandem.prefix import prefix_identities

# All in units of one prompt token computed. Shipping a token's KV takes a fraction of computing it; every further
# request at a decode worker makes each step of all others longer.
SHIP_COST = 0.05
RUNNING_REQUEST_COST = 16.0


class CacheAware(RoutingPolicy):
    """Estimates for each pair the prompt tokens queued at the prefill worker, those of this prompt that it has not
    cached, those to ship that the decode worker has not cached, and how full the decode worker is; takes the least."""

    def __init__(self) -> None:
        self._index = PrefixIndex()

    def choose(self, pairs: Sequence[Pair], prompt: Prompt) -> Pair:
        page_size = pairs[0].prefill.hello.page_format.page_size
        identities = prefix_identities(prompt.token_ids, page_size, prompt.cache_namespace)
        num_tokens = len(prompt.token_ids)
        cached: dict[str, int] = {}

        def num_uncached(worker: Worker) -> int:
            life = worker.hello.incarnation
            if life not in cached:
                cached[life] = self._index.num_pages(life, identities) * page_size
            return num_tokens - cached[life]

        def cost(pair: Pair) -> float:
            ship = 0 if pair.prefill is pair.decode else SHIP_COST * num_uncached(pair.decode)
            queued = pair.prefill.num_pending_tokens + num_uncached(pair.prefill)
            return queued + ship + RUNNING_REQUEST_COST * pair.decode.num_assigned

        pair = min(pairs, key=cost)
        for worker in (pair.prefill, pair.decode):
            self._index.insert(worker.hello.incarnation, identities)
        return pair

    def finished(self, pair: Pair, sequence: Prompt) -> None:
        page_size = pair.decode.hello.page_format.page_size
        identities = prefix_identities(sequence.token_ids, page_size, sequence.cache_namespace)
        self._index.insert(pair.decode.hello.incarnation, identities)
