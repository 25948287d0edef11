"""Log probabilities of one prompt's tokens."""

from array import array

from tandem.prompt_logprobs import PackedLogprobs
from tandem.sampling_params import TopLogprob


class PromptLogprobs:
    """
    Attributes:
        num_top: number of most likely tokens per position.
        logprobs, ranks: values of the tokens from position 1 on; rank 1 is the most likely.
        top_ids, top_logprobs: num_top values per position, the most likely first.
    """

    def __init__(self, prompt_len: int) -> None:
        self._prompt_len = prompt_len
        self.num_top = 0
        self.logprobs, self.top_logprobs = array("f"), array("f")
        self.ranks, self.top_ids = array("I"), array("I")

    @property
    def is_complete(self) -> bool:
        return len(self.logprobs) == self._prompt_len - 1

    def append(self, part: PackedLogprobs) -> None:
        """Raises ValueError if the positions do not follow, or do not fit each other."""
        if part.start != len(self.logprobs) + 1 or (self.logprobs and part.num_top != self.num_top):
            raise ValueError(f"log probabilities of a prompt from {part.start} on, after {len(self.logprobs)} of them")
        self.num_top = part.num_top
        self.logprobs.frombytes(part.logprobs)
        self.ranks.frombytes(part.ranks)
        self.top_ids.frombytes(part.top_ids)
        self.top_logprobs.frombytes(part.top_logprobs)
        num_tokens = len(self.logprobs)
        num_top = num_tokens * self.num_top
        sizes = (num_tokens, num_top, num_top)
        if (len(self.ranks), len(self.top_ids), len(self.top_logprobs)) != sizes or num_tokens >= self._prompt_len:
            raise ValueError("log probabilities of a prompt that do not belong together")

    def top(self, position: int, begin: int = 0, end: int | None = None) -> list[TopLogprob]:
        """Args: begin, end: ranks from 0; None: to the last."""
        start = (position - 1) * self.num_top
        end = start + (self.num_top if end is None else min(end, self.num_top))
        start += begin
        return list(map(TopLogprob, self.top_ids[start:end], self.top_logprobs[start:end]))
