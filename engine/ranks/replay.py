"""Batches that a follower makes from records."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tandem.engine.adapters.base import NO_ADAPTER
from tandem.engine.batch import Batch
from tandem.engine.ranks.record import ForwardRecord, PromptFlag
from tandem.engine.token_sequence import TokenSequence


@dataclass(frozen=True, slots=True)
class ReplayedBatch(Batch):
    """A batch whose sequences have only lengths and page tables. All else is in the record."""

    record: ForwardRecord = field(kw_only=True)

    def __post_init__(self) -> None:
        assert all(s.extend_len > 0 for s in self.sequences)

    @property
    def fed_rows(self) -> Sequence[int] | None:
        return None if self.record.fed_rows is None else self.record.fed_rows.tolist()

    @property
    def scores_prompts(self) -> bool:
        return self.record.scores_prompts

    @property
    def needs_hidden_states(self) -> bool:
        return self.scores_prompts or bool((self.record.flags & PromptFlag.NEEDS_EMBEDDING).any())

    def known_ids(self) -> list[int]:
        return self.record.new_ids.tolist()

    def logits_rows(self) -> list[int]:
        prompts = np.flatnonzero(self.record.flags & PromptFlag.NEEDS_LOGITS)
        num_decoded = len(self.decoded)
        return [*range(self.num_decoded_tokens), *self._last_rows()[num_decoded + prompts].tolist()]

    def pooled_rows(self) -> list[int]:
        prompts = np.flatnonzero(self.record.flags & PromptFlag.NEEDS_EMBEDDING)
        return self._last_rows()[len(self.decoded) + prompts].tolist()

    def _last_rows(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        return np.cumsum([s.extend_len for s in self.sequences]) - 1


class Replay:
    """Keeps the copies of page tables."""

    def __init__(self) -> None:
        self._sequences: dict[int, TokenSequence] = {}

    def batch(self, record: ForwardRecord) -> ReplayedBatch:
        """Returns the record's batch. The sequences are valid until the next call."""
        updates, end = record.updates, 0
        for copy_id, first, count in zip(*(numbers.tolist() for numbers in updates[:3]), strict=True):
            page_ids = array("i", updates.page_ids[end : end + count].tobytes())
            end += count
            if first:
                table = self._sequences[copy_id].page_ids
                assert isinstance(table, array) and len(table) == first
                table.extend(page_ids)
            else:
                self._sequences[copy_id] = TokenSequence([], 0, page_ids)
        sequences = [self._sequences[copy_id] for copy_id in record.copy_ids.tolist()]
        num_decoded = len(sequences) - len(record.device_lens)
        for sequence, cached_len in zip(sequences, record.cached_lens.tolist(), strict=True):
            sequence.cached_len, sequence.device_len, sequence.draft_ids = cached_len, cached_len + 1, ()
        for sequence, num_drafts in zip(sequences, record.num_drafts.tolist(), strict=False):
            # Their ids are in the record.
            sequence.draft_ids = (0,) * num_drafts
            sequence.device_len += num_drafts
        for sequence, device_len in zip(sequences[num_decoded:], record.device_lens.tolist(), strict=True):
            sequence.device_len = device_len
        slots = record.adapter_slots.tolist() or [NO_ADAPTER] * len(sequences)
        for sequence, slot in zip(sequences, slots, strict=True):
            sequence.adapter_slot = slot
        return ReplayedBatch(record.mode, sequences, None, record.num_mixed, record=record)
