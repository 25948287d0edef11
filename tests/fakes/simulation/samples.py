"""Every token that the engines of a simulated cluster have sampled, with the tokens before it."""

import itertools
from collections import defaultdict
from collections.abc import Sequence

from tandem.sampling_params import SamplingParams
from tests.fakes.engine import next_token
from tests.fakes.tokenizer import ByteTokenizer


class Samples:
    """Sample each token randomly, so that two attempts of one request differ.

    An output mixed from both attempts is then detected: each token must have been sampled after exactly those before
    it.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        # Seeds of the requests that sampled the last of these tokens after all the others.
        self._seeds: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)

    def sample(self, token_ids: Sequence[int], sampling: SamplingParams) -> int:
        token = (next_token(token_ids) + next(self._numbers) % 2) % ByteTokenizer.vocab_size
        self._seeds[*token_ids, token].add(sampling.seed)
        return token

    def seeds_of(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> set[int]:
        """Return the seeds of the requests that may have given this nonempty output."""
        found: set[int] | None = None
        for num_tokens in range(1, len(output_ids) + 1):
            seeds = self._seeds.get((*prompt_ids, *output_ids[:num_tokens]), set())
            found = set(seeds) if found is None else found & seeds
        assert found is not None
        return found
