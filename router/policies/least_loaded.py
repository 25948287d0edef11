"""The pair with the least to do."""

import random

from tandem.router.policies.base import RoutingPolicy, RoutingRequest
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.worker import Pair, Worker

# A handover to another host counts as much as a request in hand, and as two beyond the rack.
FARTHER_COST = 1.0


class LeastLoaded(RoutingPolicy):
    """A pair's load is the requests in hand at both workers, by the routers' own counts: a burst between two heartbeats
    is seen too. Among equals chance decides, for routers that do not see each other's newest choices must not all take
    the same pair."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        return candidates.least(self._cost, self._cost, farther_cost=FARTHER_COST)

    def _cost(self, worker: Worker) -> float:
        # Two of these are less than one request.
        return worker.num_assigned + 0.5 * self._random.random()
