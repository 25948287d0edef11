"""Who serves a request."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from router.worker_registry import Pair


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a policy may know of a request: prompt, and output of earlier attempts."""

    token_ids: Sequence[int]
    cache_namespace: str = ""


class RoutingPolicy(ABC):
    """Chooses prefill and decode worker together: what is cached at one decides what must be shipped to the other."""

    @abstractmethod
    def choose(self, pairs: Sequence[Pair], prompt: Prompt) -> Pair:
        """Chooses among at least one candidate, whose workers' loads the router keeps up to date."""

    def finished(self, pair: Pair, sequence: Prompt) -> None:
        """A request has ended; `sequence` is its prompt with the output, which the decode worker has cached now."""
        # Most policies have nothing to learn from that.
        return
