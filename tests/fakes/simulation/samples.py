"""Which tokens the engines of a simulated cluster have sampled, and after which."""

import itertools
from collections import defaultdict
from collections.abc import Sequence

from tandem.sampling_params import SamplingParams
from tests.fakes.engine import next_token
from tests.fakes.tokenizer import ByteTokenizer


class Samples:
    """Draws each token anew: two attempts of one request go on in different ways, so an output that was put together
    from both is seen. Every token of an output must have been sampled after exactly those before it."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        # The seeds of the requests for which the last of these tokens was sampled after all the others.
        self._seeds: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)

    def sample(self, token_ids: Sequence[int], sampling: SamplingParams) -> int:
        token = (next_token(token_ids) + next(self._numbers) % 2) % ByteTokenizer.vocab_size
        self._seeds[*token_ids, token].add(sampling.seed)
        return token

    def seeds_of(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> set[int]:
        """Of the requests that may have given this output, which has a token at least."""
        found: set[int] | None = None
        for num_tokens in range(1, len(output_ids) + 1):
            seeds = self._seeds.get((*prompt_ids, *output_ids[:num_tokens]), set())
            found = set(seeds) if found is None else found & seeds
        assert found is not None
        return found
