"""Packed log probabilities of prompts, which may have 100,000 tokens."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackedLogprobs:
    """Log probabilities of consecutive prompt tokens, in little-endian arrays that no process on the way unpacks.

    Attributes:
        start: position of the first token in the prompt, at least 1.
        num_top: alternatives per token.
        logprobs: natural logarithms, float32.
        ranks: 1 plus the number of more likely tokens, uint32.
        top_ids: num_top ids per token, most likely first, uint32.
        top_logprobs: their log probabilities, float32.
    """

    start: int
    num_top: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes
