"""The pair with the least to do."""

from collections.abc import Sequence

from router.policies.base import RoutingPolicy, RoutingRequest
from router.worker_registry import Pair


def load(pair: Pair) -> int:
    """Requests in hand at both workers, by the router's own count: a burst between two heartbeats is seen too."""
    return pair.prefill.num_assigned + pair.decode.num_assigned


class LeastLoaded(RoutingPolicy):
    """The first pair among equals."""

    def choose(self, candidates: Sequence[Pair], request: RoutingRequest) -> Pair:
        return min(candidates, key=load)
