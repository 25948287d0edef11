"""The leader's side of forward passes on several ranks."""

from collections.abc import Sequence

import numpy as np

from tandem.adapters import AdapterRef
from tandem.engine.adapters.follower import LoadOrder
from tandem.engine.batch import Batch
from tandem.engine.prompt_logprobs import ScoredRows
from tandem.engine.ranks.launches import RankLaunches
from tandem.engine.ranks.progress import Progress
from tandem.engine.ranks.record import NO_NUMBERS, ForwardRecord, GraphSize, Int32s, PromptFlag, numbers
from tandem.engine.ranks.ring import Ring
from tandem.engine.ranks.tables import MAX_COPIES, TableWriter
from tandem.engine.token_sequence import TokenSequence


class ForwardRecorder(RankLaunches):
    """Writes the record of each forward pass into the ring."""

    def __init__(self, ring: Ring, progress: Progress, page_size: int, max_copies: int = MAX_COPIES) -> None:
        """Args: max_copies: of page tables, at the followers; more than the sequences of any batch."""
        self._ring = ring
        self._progress = progress
        self._tables = TableWriter(page_size, max_copies)
        self._number = 0
        self._num_loads = 0

    def publish(self, batch: Batch, num_fed: int, graph: GraphSize, scored: Sequence[ScoredRows]) -> int:
        self._number += 1
        sequences, prompts = batch.sequences, batch.prompts
        prompt_lens = flags = NO_NUMBERS
        if prompts:
            prompt_lens, flags = numbers([s.device_len for s in prompts]), numbers([_flags(s) for s in prompts])
        fed_rows, unfed = None, []
        if batch.feed is not None:
            fed_rows = numbers(batch.feed.rows)
            unfed = (fed_rows < 0).nonzero()[0].tolist()
        num_drafts = NO_NUMBERS
        if batch.feed is None and batch.num_drafts:
            num_drafts = numbers([len(s.draft_ids) for s in batch.decoded])
        told = self._tables.update(sequences, prompt_lens, fed_rows, unfed, num_drafts)
        record = ForwardRecord(
            self._number,
            batch.mode,
            batch.num_mixed,
            graph,
            num_fed,
            bool(prompts) and batch.scores_prompts,
            told.copy_ids,
            told.cached_lens,
            prompt_lens,
            flags,
            fed_rows,
            numbers(batch.known_ids()) if prompts or fed_rows is None else _unfed_ids(sequences, unfed),
            told.updates,
            scored,
            # Looking at all sequences takes a fifth of the time of this function.
            numbers([s.adapter_slot for s in sequences]) if self._num_loads and batch.has_adapters else NO_NUMBERS,
            num_drafts,
        )
        self._ring.write(record.encode())
        return self._number

    def publish_load(self, slot: int, info: AdapterRef) -> int:
        self._num_loads += 1
        self._ring.write(LoadOrder(self._num_loads, slot, info.content_hash, info.path).encode())
        return self._num_loads

    def has_load_failed(self, order: int) -> bool | None:
        if self._progress.ended_load() < order:
            return None
        return self._progress.failed_load() >= order

    def num_completed(self) -> int:
        return self._progress.completed_forward()


def _flags(prompt: TokenSequence) -> int:
    return PromptFlag.NEEDS_LOGITS * prompt.needs_logits + PromptFlag.NEEDS_EMBEDDING * prompt.needs_embedding


def _unfed_ids(sequences: Sequence[TokenSequence], unfed: Sequence[int]) -> Int32s:
    new_ids = np.zeros(len(sequences), np.int32)
    for index in unfed:
        sequence = sequences[index]
        new_ids[index] = sequence.token_ids[sequence.cached_len]
    return new_ids
