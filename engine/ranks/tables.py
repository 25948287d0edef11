"""Page tables that a leader's followers have copies of."""

from array import array
from collections.abc import Sequence

import numpy as np

from tandem.engine.kvcache.page_table import NO_COPY, PageTable
from tandem.engine.ranks.record import Int32s, TableUpdate
from tandem.engine.token_sequence import TokenSequence

# More than the sequences of any batch.
MAX_COPIES = 4096


class TableWriter:
    """Keeps the followers' copies of page tables current, by sending new page ids alone.

    A copy that a batch has not used for the longest time gives way to a new one.
    """

    def __init__(self, page_size: int, max_copies: int = MAX_COPIES) -> None:
        self._page_size = page_size
        self._tables: list[PageTable | None] = [None] * max_copies
        # Pages sent, and the last batch that used the copy, by copy.
        self._num_sent = np.zeros(max_copies, np.int32)
        self._last_used = np.zeros(max_copies, np.int64)
        self._num_batches = 0

    def update(self, sequences: Sequence[TokenSequence], device_lens: Int32s) -> tuple[Int32s, list[TableUpdate]]:
        """Returns the number of each sequence's copy, and the updates that the copies need to cover device_lens."""
        assert len(sequences) <= len(self._tables), "a batch has more sequences than there are copies"
        self._num_batches += 1
        # A cast of each would double the time.
        copy_ids = np.frombuffer(array("i", [s.page_ids.copy_id for s in sequences]), np.int32)  # type: ignore[attr-defined]
        if copy_ids.min() < 0:
            # First, so that no new table takes the place of one in the batch.
            self._last_used[copy_ids[copy_ids >= 0]] = self._num_batches
            copy_ids = copy_ids.copy()
            for index in np.flatnonzero(copy_ids < 0).tolist():
                copy_ids[index] = self._new_copy(sequences[index].page_ids)
        self._last_used[copy_ids] = self._num_batches
        num_pages = (device_lens + (self._page_size - 1)) // self._page_size
        short = np.flatnonzero(num_pages > self._num_sent[copy_ids]).tolist()
        return copy_ids, [self._send(sequences[index].page_ids) for index in short]

    def _new_copy(self, table: Sequence[int]) -> int:
        assert isinstance(table, PageTable)
        copy_id = int(self._last_used.argmin())
        replaced = self._tables[copy_id]
        if replaced is not None and replaced.copy_id == copy_id:
            replaced.copy_id = NO_COPY
        self._tables[copy_id] = table
        self._num_sent[copy_id] = 0
        self._last_used[copy_id] = self._num_batches
        table.copy_id = copy_id
        return copy_id

    def _send(self, table: Sequence[int]) -> TableUpdate:
        assert isinstance(table, PageTable)
        first = int(self._num_sent[table.copy_id])
        self._num_sent[table.copy_id] = len(table)
        return TableUpdate(table.copy_id, first, table[first:])
