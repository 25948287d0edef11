"""Batches that measure an engine before it serves."""

from collections.abc import Iterator, Sequence
from itertools import cycle, islice

from tandem.engine.adapters.base import NO_ADAPTER
from tandem.engine.batch import Batch
from tandem.engine.models.config import ModelConfig
from tandem.engine.token_sequence import TokenSequence
from tandem.sampling_params import SamplingParams

# Bounds between kernels of decode steps. Experts of up to 8 rows have a kernel for each power of two.
DECODE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Libraries choose kernels by the number of tokens, in steps of TOKEN_STEP, and by the number of prompts. Up to
# FEW_TOKENS they alternate with our own at a finer step.
TOKEN_STEP = 128
FEW_TOKENS, FEW_TOKENS_STEP = 4096, 64
NUM_PROMPTS = (1, 17, 32, 4, 64, 24, 9, 96, 48)

GREEDY = SamplingParams(max_tokens=1)


class TrialBatches:
    """Makes batches whose page tables repeat page 0.

    Tokens differ from each other, because equal ones would choose the same experts.
    """

    def __init__(self, model: ModelConfig, adapter_slot: int = NO_ADAPTER) -> None:
        """Args: adapter_slot: of all sequences."""
        self._adapter_slot = adapter_slot
        self._longest = model.max_position_embeddings
        self._token_ids = cycle(range(model.vocab_size))

    def prefill(self, num_tokens: int, cached_len: int, num_prompts: int, sampling: SamplingParams) -> Batch:
        """Args: num_prompts: more if the model's longest sequence is too short."""
        num_rows = max(min(num_prompts, num_tokens), -(-num_tokens // (self._longest - cached_len)))
        shortest, num_longer = divmod(num_tokens, num_rows)
        lengths = [cached_len + shortest + (row < num_longer) for row in range(num_rows)]
        return Batch("prefill", self._sequences(lengths, cached_len, sampling))

    def decode(self, batch_size: int, sampling: SamplingParams) -> Batch:
        return Batch("decode", self._sequences([2] * batch_size, 1, sampling))

    def drafted(self, num_rows: int, max_drafts: int, sampling: SamplingParams) -> Batch:
        """Returns a decode step of `num_rows` tokens, with the most drafts of each sequence."""
        num_drafts = [max_drafts] * (num_rows // (1 + max_drafts))
        if rest := num_rows % (1 + max_drafts):
            num_drafts.append(rest - 1)
        sequences = self._sequences([2 + num for num in num_drafts], 1, sampling)
        for sequence, num in zip(sequences, num_drafts, strict=True):
            sequence.draft_ids = sequence.token_ids[2:]
            del sequence.token_ids[2:]
            assert len(sequence.draft_ids) == num
        return Batch("decode", sequences)

    def mixed(self, batch_size: int, num_tokens: int, num_prompts: int, sampling: SamplingParams) -> Batch:
        prompts = self.prefill(num_tokens, 1, num_prompts, sampling).prompts
        return Batch.of(self.decode(batch_size, sampling).decoded, prompts)

    def prefills(self, max_tokens: int) -> Iterator[Batch]:
        """Yields prefills with less than max_tokens that meet all kernels, of new and of continued prompts."""
        few = range(FEW_TOKENS_STEP, min(FEW_TOKENS, max_tokens), FEW_TOKENS_STEP)
        for number, num_tokens in enumerate((*few, *range(FEW_TOKENS, max_tokens, TOKEN_STEP))):
            num_prompts = NUM_PROMPTS[number % len(NUM_PROMPTS)]
            yield self.prefill(num_tokens, number % 2, num_prompts, GREEDY)

    def steps(self, max_batch_size: int, sizes: Sequence[int] = DECODE_SIZES) -> Iterator[Batch]:
        """Yields decode steps of those of the sizes that are below max_batch_size."""
        for size in sizes:
            if size < max_batch_size:
                yield self.decode(size, GREEDY)

    def _sequences(self, lengths: Sequence[int], cached_len: int, sampling: SamplingParams) -> list[TokenSequence]:
        sequences = []
        for length in lengths:
            token_ids = list(islice(self._token_ids, length))
            sequence = TokenSequence(
                token_ids, length, [0] * length, cached_len, sampling, adapter_slot=self._adapter_slot
            )
            sequence.extend(length - cached_len)
            sequences.append(sequence)
        return sequences
