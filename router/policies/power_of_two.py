"""The less loaded of two pairs drawn at random."""

import random
from collections.abc import Sequence

from router.policies.base import RoutingPolicy, RoutingRequest
from router.policies.least_loaded import load
from router.worker_registry import Pair


class PowerOfTwo(RoutingPolicy):
    """Nearly as even as looking at all, and several routers that cannot see each other do not all choose the same."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Sequence[Pair], request: RoutingRequest) -> Pair:
        return min(self._random.sample(list(candidates), min(2, len(candidates))), key=load)
