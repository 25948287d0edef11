"""Every pair in turn."""

from collections.abc import Sequence

from router.policies.base import RoutingPolicy, RoutingRequest
from router.worker_registry import Pair


class RoundRobin(RoutingPolicy):
    """Turns through prefill and decode workers at once, so that N requests over N x M pairs load all workers evenly."""

    def __init__(self) -> None:
        # When each worker was last chosen, by a count of choices.
        self._last: dict[str, int] = {}
        self._num_choices = 0

    def choose(self, candidates: Sequence[Pair], request: RoutingRequest) -> Pair:
        pair = min(candidates, key=self._last_chosen)
        self._num_choices += 1
        self._last[pair.prefill.worker_id] = self._last[pair.decode.worker_id] = self._num_choices
        return pair

    def _last_chosen(self, pair: Pair) -> tuple[int, int]:
        return self._last.get(pair.prefill.worker_id, 0), self._last.get(pair.decode.worker_id, 0)
