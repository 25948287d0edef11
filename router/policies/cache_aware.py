"""The pair with the least work left for a request."""

import random
import time
from collections.abc import Callable

from tandem.router.policies.base import RoutingRequest
from tandem.router.policies.prefix_policy import PrefixPolicy
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.worker import Pair, Worker

# Costs in units of one computed prompt token. Shipping a token's KV takes a fraction of computing it. Each request at a
# decode worker lengthens every step of the others.
SHIP_COST = 0.05
RUNNING_REQUEST_COST = 16.0
# Cost of a handover to another host; twice that beyond the rack.
FARTHER_COST = RUNNING_REQUEST_COST
# Less than the smallest meaningful difference.
TIE_COST = SHIP_COST / 4
# Guards against workers that have measured no time per token.
LEAST_TOKEN_S = 1e-9


class CacheAware(PrefixPolicy):
    """Minimizes queued prompt tokens, tokens of this prompt to compute or load, tokens to ship, and the decode
    worker's requests."""

    def __init__(self, seed: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        # Ties are random, as in LeastLoaded.
        self._random = random.Random(seed)

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        num_tokens = len(request.token_ids)
        alone, senders, receivers = candidates.alone(), candidates.senders(), candidates.receivers()
        cached, expected = self.num_cached(
            {**dict.fromkeys(alone), **dict.fromkeys(senders), **dict.fromkeys(receivers)}, request
        )
        options = self.load_options([*alone, *senders], request, cached)
        some = self._random.random

        def prefill_cost(worker: Worker) -> float:
            num_to_compute = float(num_tokens - cached.get(worker, 0))
            token_s = worker.forward_times.prompt_token_s
            for num_ready, seconds in options.get(worker, ()):
                # Loading counts as the tokens that could be computed meanwhile.
                num_to_compute = min(num_to_compute, num_tokens - num_ready + seconds / max(token_s, LEAST_TOKEN_S))
            return worker.num_pending_tokens + num_to_compute + adapter_cost(worker) + TIE_COST * some()

        def adapter_cost(worker: Worker) -> float:
            # Waiting counts as loading does.
            return worker.adapters.wait_s(request.adapter) / max(worker.forward_times.prompt_token_s, LEAST_TOKEN_S)

        def decode_cost(worker: Worker) -> float:
            num_to_ship = num_tokens - expected.get(worker, 0)
            running = RUNNING_REQUEST_COST * worker.num_assigned
            return SHIP_COST * num_to_ship + running + adapter_cost(worker) + TIE_COST * some()

        return candidates.least_of(
            # A single worker ships nothing.
            {worker: prefill_cost(worker) + RUNNING_REQUEST_COST * worker.num_assigned for worker in alone},
            {worker: prefill_cost(worker) for worker in senders},
            {worker: decode_cost(worker) for worker in receivers},
            FARTHER_COST,
        )
