"""Prompts that nobody has sent before, so that pools fill and evict."""

import random
from typing import Any

from benchmarks.soak.kinds.base import Clients, Kind
from benchmarks.soak.kinds.over_grpc import TIMEOUT_S
from tandem.client.requests import make_request

_MAX_PROMPT_TOKENS = 180
_MAX_TOKENS = 12
# Rounding differs between batches. Two tokens this close in log probability may change places.
_TIE = 1e-3
NUM_IDS = 8000


class Fresh(Kind):
    """A new random prompt, sent twice: once for the answer, once to compare."""

    name = "new prompt twice, gRPC"

    def first(self, clients: Clients, number: int) -> Any:
        return None

    def again(self, clients: Clients, number: int, rng: random.Random) -> Any:
        prompt = [rng.randrange(100, NUM_IDS) for _ in range(rng.randint(20, _MAX_PROMPT_TOKENS))]
        return _greedy(clients, prompt), _greedy(clients, prompt)

    def is_right(self, first: Any, again: Any) -> bool:
        one, other = again
        for (token_id, margin), (other_id, _) in zip(one, other, strict=True):
            if token_id != other_id:
                # Behind a tie the outputs differ rightly.
                return bool(margin < _TIE)
        return True


def _greedy(clients: Clients, prompt: list[int]) -> list[tuple[int, float]]:
    """Return the output's tokens, each with its lead over the second most likely one."""
    request = make_request(prompt, max_tokens=_MAX_TOKENS, ignore_eos=True, logprobs=2)
    return [
        (token_id, logprobs.top[0].logprob - logprobs.top[1].logprob)
        for response in clients.grpc.generate(request, TIMEOUT_S)
        for token_id, logprobs in zip(response.token_ids, response.logprobs, strict=True)
    ]
