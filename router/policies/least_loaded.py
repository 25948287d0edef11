"""The pair with the fewest requests."""

import random

from tandem.router.policies.base import RoutingPolicy, RoutingRequest
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.worker import Pair, Worker

# Cost of a handover to another host, in requests; twice that beyond the rack.
FARTHER_COST = 1.0
# Cost of waiting a second for an adapter, in requests.
WAIT_COST = 8.0


class LeastLoaded(RoutingPolicy):
    """Uses the routers' own counts, which also show a burst between two heartbeats. Ties are random: routers see each
    other's choices late and must not all take the same pair."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        adapter = request.adapter
        if adapter is None:
            return candidates.least(self._cost, self._cost, farther_cost=FARTHER_COST)

        def cost(worker: Worker) -> float:
            # Also a short wait counts more than chance.
            wait_s = worker.adapters.wait_s(adapter)
            return self._cost(worker) + (0.5 + WAIT_COST * wait_s if wait_s else 0.0)

        return candidates.least(cost, cost, farther_cost=FARTHER_COST)

    def _cost(self, worker: Worker) -> float:
        # The random parts of a pair sum to less than one request.
        return worker.num_assigned + 0.5 * self._random.random()
