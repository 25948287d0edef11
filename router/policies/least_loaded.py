"""The pair with the least to do."""

from router.candidates import Candidates
from router.policies.base import RoutingPolicy, RoutingRequest
from router.worker import Pair, Worker


class LeastLoaded(RoutingPolicy):
    """The first pair among equals. A pair's load is the requests in hand at both workers, by the router's own count: a
    burst between two heartbeats is seen too."""

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        return candidates.least(_num_assigned, _num_assigned)


def _num_assigned(worker: Worker) -> int:
    return worker.num_assigned
