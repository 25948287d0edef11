"""What a scheduler asks of an engine."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from tandem.engine.batch import Batch
from tandem.sampling_params import TokenLogprobs


@dataclass(slots=True)
class EngineCounters:
    """Tokens whose KV `forward` has computed since the start."""

    prompt_tokens_computed: int = 0
    output_tokens_computed: int = 0

    def count(self, batch: Batch) -> None:
        num_prompt_tokens = batch.num_prompt_tokens()
        self.prompt_tokens_computed += num_prompt_tokens
        self.output_tokens_computed += batch.num_tokens - num_prompt_tokens


class ForwardOutput(ABC):
    """The outcome of a forward that may still be running."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the forward has completed, so that nothing touches its pages any more."""

    @abstractmethod
    def token_ids(self) -> list[int]:
        """Waits, then returns the next token of each sequence of the batch that needs logits, in batch order."""

    @abstractmethod
    def logprobs(self) -> list[TokenLogprobs | None]:
        """Waits, then returns the log probabilities of each of these tokens, None where they are not asked for."""


@dataclass(slots=True)
class EngineBase(ABC):
    """One model on one device. Knows token ids, never text, never a socket."""

    counters: EngineCounters = field(default_factory=EngineCounters, init=False)

    @abstractmethod
    def forward(self, batch: Batch) -> ForwardOutput:
        """Launches one forward: writes the KV of the batch's tokens into their pages and samples what comes next.

        The caller marks the sequences with complete_extend.
        """
