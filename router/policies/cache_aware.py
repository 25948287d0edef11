"""The pair that has least left to do for this very request."""

import random
import time
from collections.abc import Callable

from tandem.router.policies.base import RoutingRequest
from tandem.router.policies.prefix_policy import PrefixPolicy
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.worker import Pair, Worker

# Both costs are in units of one prompt token computed. Shipping a token's KV takes a fraction of computing it; every
# further request at a decode worker makes each step of all others longer.
SHIP_COST = 0.05
RUNNING_REQUEST_COST = 16.0
# Of a handover to another host, and twice as much beyond the rack.
FARTHER_COST = RUNNING_REQUEST_COST
# Less than the smallest difference that means something.
TIE_COST = SHIP_COST / 4


class CacheAware(PrefixPolicy):
    """Adds up for each pair the prompt tokens queued at the prefill worker, those of this prompt that it has not
    cached, those to ship that the decode worker has not cached, and how full the decode worker is; takes the least."""

    def __init__(self, seed: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        # Among equals chance decides, as in LeastLoaded.
        self._random = random.Random(seed)

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        num_tokens = len(request.token_ids)
        alone, senders, receivers = candidates.alone(), candidates.senders(), candidates.receivers()
        cached, expected = self.num_cached(
            {**dict.fromkeys(alone), **dict.fromkeys(senders), **dict.fromkeys(receivers)}, request
        )
        some = self._random.random

        def prefill_cost(worker: Worker) -> float:
            return worker.num_pending_tokens + num_tokens - cached.get(worker, 0) + TIE_COST * some()

        def decode_cost(worker: Worker) -> float:
            num_to_ship = num_tokens - expected.get(worker, 0)
            return SHIP_COST * num_to_ship + RUNNING_REQUEST_COST * worker.num_assigned + TIE_COST * some()

        return candidates.least_of(
            # One worker has nothing to ship.
            {worker: prefill_cost(worker) + RUNNING_REQUEST_COST * worker.num_assigned for worker in alone},
            {worker: prefill_cost(worker) for worker in senders},
            {worker: decode_cost(worker) for worker in receivers},
            FARTHER_COST,
        )
