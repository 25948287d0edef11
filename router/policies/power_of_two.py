"""The less loaded of two random pairs."""

import random

from tandem.router.policies.base import RoutingPolicy, RoutingRequest
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.worker import Pair, Worker


class PowerOfTwo(RoutingPolicy):
    """Balances nearly as well as a full scan. Routers that cannot see each other rarely choose the same pair."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        prefill_workers = candidates.prefill_workers
        drawn = [self._draw(candidates, prefill_workers) for _ in range(2)]
        # Of equally loaded pairs, the one that has the adapter.
        return min(drawn, key=lambda pair: (_load(pair), _wait_s(pair, request)))

    def _draw(self, candidates: Candidates, prefill_workers: list[Worker]) -> Pair:
        prefill = self._random.choice(prefill_workers)
        return Pair(prefill, self._random.choice(candidates.decode_workers_of(prefill)))


def _wait_s(pair: Pair, request: RoutingRequest) -> float:
    return max(worker.adapters.wait_s(request.adapter) for worker in (pair.prefill, pair.decode))


def _load(pair: Pair) -> int:
    return pair.prefill.num_assigned + pair.decode.num_assigned
