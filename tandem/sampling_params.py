"""How the tokens of one request are chosen and when they end."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What travels with a request to every worker that may continue it.

    Attributes:
        max_tokens: output tokens at most, at least 1; counted over all attempts.
        seed: with the position in the whole sequence, the only source of randomness. Greedy decoding ignores it.
        stop_token_ids: tokens that end the output, the model's end-of-sequence ids among them unless the client
            asked to ignore those.
    """

    max_tokens: int
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def finish_reason(self, token_id: int, num_output_tokens: int) -> str:
        """Returns "stop", "length" or "" for an output whose last token is `token_id`."""
        if token_id in self.stop_token_ids:
            return "stop"
        if num_output_tokens >= self.max_tokens:
            return "length"
        return ""
