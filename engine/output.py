"""What a forward gives, and how the next one takes it up on the device."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.prompt_logprobs import PackedLogprobs
from tandem.sampling_params import TokenLogprobs


class ForwardOutput(ABC):
    """The outcome of a forward that may still be running."""

    def sample(self) -> None:
        """Chooses the tokens of a batch that `waits_for_tokens`, once those of the step before are in its sequences;
        of any other they are being chosen already."""
        return

    @abstractmethod
    def done(self) -> bool:
        """Whether the forward has completed, so that nothing touches its pages any more."""

    @abstractmethod
    def token_ids(self) -> list[int]:
        """Waits, then returns the next token of each sequence of the batch that needs logits, in batch order."""

    @abstractmethod
    def logprobs(self) -> list[TokenLogprobs | None]:
        """Waits, then returns the log probabilities of each of these tokens, None where they are not asked for."""

    @abstractmethod
    def prompt_logprobs(self) -> list[PackedLogprobs | None]:
        """Waits, then returns for each sequence of the batch, in batch order, the log probabilities of those tokens of
        its prompt that follow a computed one. None where they are not asked for, or there are none."""

    def duration_s(self) -> float:
        """Waits, then returns how many seconds the device took; to be asked of asynchronous engines alone."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Feed:
    """Where a forward finds the tokens that are not known on the host yet.

    Attributes:
        output: of the last forward launched before that decodes anything, of the same engine.
        rows: for each sequence that is decoded its row there; -1 where the token to compute is known.
    """

    output: ForwardOutput
    rows: Sequence[int]
