"""Interface of the leader's engine to its followers while it serves."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tandem.adapters import AdapterRef
from tandem.engine.batch import Batch
from tandem.engine.prompt_logprobs import ScoredRows
from tandem.engine.ranks.record import GraphSize


class RankLaunches(ABC):
    """Publishes the leader's forward passes to the followers. Used by the engine thread alone."""

    @abstractmethod
    def publish(self, batch: Batch, num_fed: int, graph: GraphSize, scored: Sequence[ScoredRows]) -> int:
        """Publishes a forward pass for the followers to launch. Call it before the leader's own launch.

        Waits for a free slot if the followers have not taken earlier records.

        Args:
            num_fed: rows of the output that feeds the batch; 0 if the host knows all tokens.
            graph: CUDA graph that runs the batch.
            scored: rows of prompts that need logits for log probabilities.

        Returns:
            The number of the forward pass, from 1 without gaps.

        Raises:
            TimeoutError: a follower stands still.
        """

    @abstractmethod
    def publish_load(self, slot: int, info: AdapterRef) -> int:
        """Orders the followers to load an adapter, behind the forward passes published so far.

        Returns:
            The number of the order, from 1 without gaps.

        Raises:
            TimeoutError: a follower stands still.
        """

    @abstractmethod
    def has_load_failed(self, order: int) -> bool | None:
        """Returns whether a follower has failed to load this order, or a later one; None: some have not ended. Any
        thread may call it."""

    @abstractmethod
    def num_completed(self) -> int:
        """Returns the number of the last forward pass that the devices of all followers have completed."""
