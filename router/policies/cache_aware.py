"""The pair that has least left to do for this very request."""

import random

from router.candidates import Candidates
from router.policies.base import RequestEnd, RoutingPolicy, RoutingRequest
from router.policies.prefix_index import PrefixIndex
from router.worker import Pair, Worker
from tandem.prefix import prefix_identities

# Both costs are in units of one prompt token computed. Shipping a token's KV takes a fraction of computing it; every
# further request at a decode worker makes each step of all others longer.
SHIP_COST = 0.05
RUNNING_REQUEST_COST = 16.0
# Less than the smallest difference that means something.
TIE_COST = SHIP_COST / 4


class CacheAware(RoutingPolicy):
    """Estimates for each pair the prompt tokens queued at the prefill worker, those of this prompt that it has not
    cached, those to ship that the decode worker has not cached, and how full the decode worker is; takes the least."""

    def __init__(self, seed: int | None = None) -> None:
        self._index = PrefixIndex()
        # Among equals chance decides, as in LeastLoaded.
        self._random = random.Random(seed)

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        token_ids = request.token_ids
        page_size = candidates.prefill_workers[0].page_size
        identities = prefix_identities(token_ids, page_size, request.cache_namespace)
        num_tokens = len(token_ids)
        known_pages = self._index.known_pages(identities)

        def num_uncached(worker: Worker) -> int:
            return num_tokens - page_size * known_pages(worker.incarnation)

        def prefill_cost(worker: Worker) -> float:
            return worker.num_pending_tokens + num_uncached(worker) + TIE_COST * self._random.random()

        def decode_cost(worker: Worker) -> float:
            running_cost = RUNNING_REQUEST_COST * worker.num_assigned
            return SHIP_COST * num_uncached(worker) + running_cost + TIE_COST * self._random.random()

        def both_cost(worker: Worker) -> float:
            # It has nothing to ship.
            return prefill_cost(worker) + RUNNING_REQUEST_COST * worker.num_assigned

        pair = candidates.least(prefill_cost, decode_cost, both_cost)
        # Here and not once the attempt has started: the identities need not be computed again.
        for worker in (pair.prefill, pair.decode):
            self._index.record_sent(worker.incarnation, identities)
        return pair

    def request_finished(self, pair: Pair | None, request: RoutingRequest, end: RequestEnd) -> None:
        if pair is None or end != "finished":
            return
        # The decode worker has cached the output too.
        decode = pair.decode
        identities = prefix_identities(request.token_ids, decode.page_size, request.cache_namespace)
        self._index.record_sent(decode.incarnation, identities)
