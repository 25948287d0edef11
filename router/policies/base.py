"""Who serves a request."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from router.registry import Pair


class Policy(ABC):
    @abstractmethod
    def choose(self, pairs: Sequence[Pair], token_ids: Sequence[int]) -> Pair:
        """Chooses prefill and decode worker together, from at least one candidate."""
