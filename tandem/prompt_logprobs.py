"""What the model thought of the tokens of a prompt, packed: a prompt may have a hundred thousand."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackedLogprobs:
    """Natural logarithms of the probabilities of some tokens of a prompt that follow each other, each after all those
    before it, and the most likely tokens at their places.

    Numbers stand one after the other in little-endian order, so that nobody on the way looks at each.

    Attributes:
        start: position of the first of these tokens in the prompt; at least 1, for nothing stands before the prompt's
            first token.
        num_top: how many of the most likely tokens there are for each.
        logprobs: of the tokens, float32.
        ranks: how many tokens are more likely than each of them, and one more; uint32.
        top_ids: num_top for each token, the most likely first; uint32.
        top_logprobs: of these, float32.
    """

    start: int
    num_top: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes
