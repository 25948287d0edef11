"""Batches that measure an engine before it serves."""

from collections.abc import Sequence
from itertools import cycle, islice

from tandem.engine.adapters.base import NO_ADAPTER
from tandem.engine.batch import Batch
from tandem.engine.models.config import ModelConfig
from tandem.engine.token_sequence import TokenSequence
from tandem.sampling_params import SamplingParams


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
