"""The leader's side of forward passes on several ranks."""

from array import array
from collections.abc import Sequence

import numpy as np

from tandem.engine.batch import Batch
from tandem.engine.prompt_logprobs import ScoredRows
from tandem.engine.ranks.launches import RankLaunches
from tandem.engine.ranks.progress import Progress
from tandem.engine.ranks.record import ForwardRecord, GraphSize, Int32s, PromptFlag
from tandem.engine.ranks.ring import Ring
from tandem.engine.ranks.tables import TableWriter
from tandem.engine.token_sequence import TokenSequence


class ForwardRecorder(RankLaunches):
    """Writes the record of each forward pass into the ring."""

    def __init__(self, ring: Ring, progress: Progress, page_size: int) -> None:
        self._ring = ring
        self._progress = progress
        self._tables = TableWriter(page_size)
        self._number = 0

    def publish(self, batch: Batch, num_fed: int, graph: GraphSize, scored: Sequence[ScoredRows]) -> int:
        self._number += 1
        sequences, prompts = batch.sequences, batch.prompts
        cached_lens = _numbers([s.cached_len for s in sequences])
        device_lens = cached_lens + 1
        prompt_lens = _NOTHING
        if prompts:
            device_lens[len(sequences) - len(prompts) :] = prompt_lens = _numbers([s.device_len for s in prompts])
        rows = batch.fed_rows
        fed_rows = None if rows is None else _numbers(rows)
        copy_ids, updates = self._tables.update(sequences, device_lens)
        record = ForwardRecord(
            self._number,
            batch.mode,
            batch.num_mixed,
            graph,
            num_fed,
            bool(prompts) and batch.scores_prompts,
            copy_ids,
            cached_lens,
            prompt_lens,
            _numbers([_flags(s) for s in prompts]) if prompts else _NOTHING,
            fed_rows,
            _new_ids(batch, fed_rows),
            updates,
            scored,
        )
        self._ring.write(record.encode())
        return self._number

    def num_completed(self) -> int:
        return self._progress.completed_forward()


_NOTHING: Int32s = np.zeros(0, np.int32)


def _numbers(values: Sequence[int]) -> Int32s:
    # Twice as fast as np.array.
    return np.frombuffer(array("i", values), np.int32)


def _flags(prompt: TokenSequence) -> int:
    return PromptFlag.NEEDS_LOGITS * prompt.needs_logits + PromptFlag.NEEDS_EMBEDDING * prompt.needs_embedding


def _new_ids(batch: Batch, fed_rows: Int32s | None) -> Int32s:
    if batch.mode == "decode" and fed_rows is not None and fed_rows.min() >= 0:
        return np.zeros(len(fed_rows), np.int32)
    return _numbers(batch.known_ids())
