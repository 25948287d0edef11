from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.prompt_logprobs import PackedLogprobs
from tandem.sampling_params import TokenLogprobs


class ForwardOutput(ABC):
    """Result of a forward pass that may still be running."""

    def sample(self) -> None:
        """Samples the tokens of a batch that `waits_for_tokens`, once its sequences have the previous step's tokens."""
        return

    @abstractmethod
    def done(self) -> bool:
        """True if the forward pass no longer touches its pages."""

    @abstractmethod
    def token_ids(self) -> list[int]:
        """Waits, then returns the next token of each sequence that needs logits, in batch order."""

    @abstractmethod
    def logprobs(self) -> list[TokenLogprobs | None]:
        """Waits, then returns these tokens' log probabilities, None where not requested."""

    @abstractmethod
    def prompt_logprobs(self) -> list[PackedLogprobs | None]:
        """Waits, then returns each sequence's log probabilities of prompt tokens behind a computed one. None where not
        requested, or without these."""

    @abstractmethod
    def embeddings(self) -> list[bytes | None]:
        """Waits, then returns each sequence's embedding, float32 and little-endian. None for sequences without."""

    def duration_s(self) -> float:
        """Waits, then returns the device's time. Asynchronous engines only."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Feed:
    """Source of tokens that the host does not know yet.

    Attributes:
        output: of the engine's last launched forward pass that decodes.
        rows: each decoded sequence's row there; -1 where the host knows the token.
    """

    output: ForwardOutput
    rows: Sequence[int]
