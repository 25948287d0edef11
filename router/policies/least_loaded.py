"""The pair with the fewest requests in hand."""

from collections.abc import Sequence

from router.policies.base import Policy
from router.registry import Pair


class LeastLoaded(Policy):
    """Counts the router's own assignments, so that a burst between two heartbeats is spread too; the first pair among
    equals."""

    def choose(self, pairs: Sequence[Pair], token_ids: Sequence[int]) -> Pair:
        return min(pairs, key=lambda pair: pair.prefill.num_assigned + pair.decode.num_assigned)
