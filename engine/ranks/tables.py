"""Page tables that a leader's followers have copies of."""

from array import array
from collections.abc import Sequence

import numpy as np

from tandem.engine.kvcache.page_table import NO_COPY, PageTable
from tandem.engine.ranks.record import Int32s, TableUpdates
from tandem.engine.token_sequence import TokenSequence

# More than the sequences of any batch.
MAX_COPIES = 8192


class TableWriter:
    """Keeps the followers' copies of page tables current, by sending new page ids alone.

    Copies that no batch has used for the longest time give way to new ones.
    """

    def __init__(self, page_size: int, max_copies: int = MAX_COPIES) -> None:
        self._page_size = page_size
        self._tables: list[PageTable | None] = [None] * max_copies
        self._free = list(range(max_copies))[::-1]
        # Pages sent, and the last batch that used the copy, by copy.
        self._num_sent = np.zeros(max_copies, np.int32)
        self._last_used = np.zeros(max_copies, np.int64)
        self._num_batches = 0

    def update(self, sequences: Sequence[TokenSequence], device_lens: Int32s) -> tuple[Int32s, TableUpdates]:
        """Returns the number of each sequence's copy, and the updates that the copies need to cover device_lens."""
        assert len(sequences) <= len(self._tables), "a batch has more sequences than there are copies"
        self._num_batches += 1
        # A cast of each would double the time.
        copy_ids = np.frombuffer(array("i", [s.page_ids.copy_id for s in sequences]), np.int32)  # type: ignore[attr-defined]
        if copy_ids.min() < 0:
            missing = np.flatnonzero(copy_ids < 0).tolist()
            if len(missing) > len(self._free):
                self._free_old(copy_ids[copy_ids >= 0], len(missing))
            for index in missing:
                copy_ids[index] = self._new_copy(sequences[index].page_ids)
        self._last_used[copy_ids] = self._num_batches
        num_pages = (device_lens + (self._page_size - 1)) // self._page_size
        return copy_ids, self._send(copy_ids[num_pages > self._num_sent[copy_ids]])

    def _new_copy(self, table: Sequence[int]) -> int:
        assert isinstance(table, PageTable)
        copy_id = self._free.pop()
        self._tables[copy_id] = table
        self._num_sent[copy_id] = 0
        table.copy_id = copy_id
        return copy_id

    def _free_old(self, needed: Int32s, num_wanted: int) -> None:
        """Gives up the oldest copies, but none that the batch needs."""
        self._last_used[needed] = self._num_batches
        # Many at once, because each search takes longer than a step's other work.
        num_freed = max(num_wanted, len(self._tables) // 16)
        for copy_id in np.argpartition(self._last_used, num_freed - 1)[:num_freed].tolist():
            if (table := self._tables[copy_id]) is None:
                continue
            # With a replaced page, it may have another copy.
            if table.copy_id == copy_id:
                table.copy_id = NO_COPY
            self._tables[copy_id] = None
            self._free.append(copy_id)

    def _send(self, copy_ids: Int32s) -> TableUpdates:
        """Returns all that the copies lack."""
        firsts = self._num_sent[copy_ids]
        page_ids = array("i")
        lengths = array("i")
        for copy_id, first in zip(copy_ids.tolist(), firsts.tolist(), strict=True):
            table = self._tables[copy_id]
            assert table is not None
            lengths.append(len(table))
            page_ids.extend(table[first:])
        self._num_sent[copy_ids] = lengths
        counts = self._num_sent[copy_ids] - firsts
        return TableUpdates(copy_ids, firsts, counts, np.frombuffer(page_ids, np.int32))
