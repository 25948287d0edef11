"""Lengths and page tables of a batch's sequences, as a leader tells them to its followers."""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from tandem.engine.config import MAX_PREFILL_BATCH_SIZE
from tandem.engine.kvcache.page_table import NO_COPY, PageTable
from tandem.engine.ranks.config import MAX_BATCH_SIZE
from tandem.engine.ranks.record import NO_NUMBERS, Int32s, TableUpdates, numbers
from tandem.engine.token_sequence import TokenSequence

MAX_COPIES = MAX_BATCH_SIZE + MAX_PREFILL_BATCH_SIZE
# In place of the batch of a free copy.
_FREE = 1 << 62
# Rows of a state matrix: the sequence's copy, cached_len, and the tokens that the copy's pages hold.
_COPY, _CACHED, _ROOM = range(3)
_NO_UPDATES = TableUpdates(NO_NUMBERS, NO_NUMBERS, NO_NUMBERS, NO_NUMBERS)


class Told(NamedTuple):
    """
    Attributes:
        copy_ids: of each sequence's page table.
        cached_lens: of each sequence.
        updates: needed by these copies to hold the tokens of the forward pass.
    """

    copy_ids: Int32s
    cached_lens: Int32s
    updates: TableUpdates


class TableWriter:
    """Keeps the followers' copies of page tables current, by sending new page ids alone.

    A feed names each sequence's row in the last batch with decoded sequences. The state of such a sequence follows from
    that batch by array operations. Only the other sequences are read, which takes several times as long.

    Copies that have not grown for the longest time give way to new ones.
    """

    def __init__(self, page_size: int, max_copies: int = MAX_COPIES) -> None:
        self._page_size = page_size
        # Weak: a table ends with its request, and its copy then has no use.
        self._tables: list[ref[PageTable] | None] = [None] * max_copies
        self._free = list(range(max_copies))[::-1]
        # Pages sent, and the last batch that sent any, by copy. No numpy arrays, because a step changes few.
        self._num_sent = array("i", [0]) * max_copies
        self._last_sent = array("q", [_FREE]) * max_copies
        self._num_batches = 0
        # Copies whose tables have got other pages, and those whose tables have ended.
        self._outdated: list[int] = []
        self._ended: list[int] = []
        # States of the last batch that decoded sequences, of these; whether some have lost their copies.
        self._decoded = np.zeros((3, 0), np.int32)
        self._has_lost = False

    def update(
        self,
        sequences: Sequence[TokenSequence],
        prompt_lens: Int32s,
        fed_rows: Int32s | None,
        unfed: Sequence[int],
        num_drafts: Int32s = NO_NUMBERS,
    ) -> Told:
        """
        Args:
            sequences: of a batch, decoded ones first.
            prompt_lens: device_len of each prompt.
            fed_rows: as in Feed.
            unfed: indices of the decoded sequences without a row.
            num_drafts: of each sequence of a decode batch; empty: none has drafts.
        """
        self._num_batches += 1
        if self._outdated:
            self._forget(self._outdated)
            self._outdated.clear()
        while self._ended:
            copy_id = self._ended.pop()
            # Another table may have the copy by now.
            if self._table(copy_id) is None:
                self._release(copy_id)
        if len(self._free) < len(sequences):
            self._free_old(sequences)
        states = self._read(sequences) if fed_rows is None else self._carry(sequences, fed_rows, unfed)
        assert states[_CACHED, 0] == sequences[0].cached_len
        # The position of the last token that is computed.
        last = states[_CACHED]
        num_decoded = len(sequences) - len(prompt_lens)
        if num_decoded:
            self._decoded, self._has_lost = states[:, :num_decoded], False
        if len(num_drafts):
            last = last + num_drafts
        if len(prompt_lens):
            last = np.concatenate((last[:num_decoded], prompt_lens - 1))
        return Told(states[_COPY], states[_CACHED], self._send(states, (last >= states[_ROOM]).nonzero()[0]))

    def _read(self, sequences: Sequence[TokenSequence]) -> Int32s:
        """Returns the states of sequences. Those without a copy get one."""
        copy_ids = [self._copy_of(sequence) for sequence in sequences]
        rooms = [self._num_sent[copy_id] * self._page_size for copy_id in copy_ids]
        # A copy, because this array may not be written.
        return numbers(copy_ids + [s.cached_len for s in sequences] + rooms).reshape(3, -1).copy()

    def _carry(self, sequences: Sequence[TokenSequence], fed_rows: Int32s, unfed: Sequence[int]) -> Int32s:
        num_decoded = len(fed_rows)
        others = [*unfed, *range(num_decoded, len(sequences))]
        # Row -1 takes any state, which is replaced below.
        states = self._decoded.take(fed_rows, 1, None, "wrap")
        cached_lens = states[_CACHED]
        cached_lens += 1
        if self._has_lost:
            others += (states[_COPY] == NO_COPY).nonzero()[0].tolist()
        if num_prompts := len(sequences) - num_decoded:
            states = np.concatenate((states, np.empty((3, num_prompts), np.int32)), 1)
        for index in others:
            sequence = sequences[index]
            copy_id = self._copy_of(sequence)
            states[:, index] = copy_id, sequence.cached_len, self._num_sent[copy_id] * self._page_size
        return states

    def _copy_of(self, sequence: TokenSequence) -> int:
        table = sequence.page_ids
        assert isinstance(table, PageTable)
        if table.copy_id == NO_COPY:
            copy_id, ended = self._free.pop(), self._ended
            self._tables[copy_id] = ref(table, lambda _: ended.append(copy_id))
            self._num_sent[copy_id] = 0
            table.set_copy(copy_id, self._outdated)
        return table.copy_id

    def _table(self, copy_id: int) -> PageTable | None:
        reference = self._tables[copy_id]
        return None if reference is None else reference()

    def _free_old(self, sequences: Sequence[TokenSequence]) -> None:
        """Gives up the oldest copies, but none that the batch needs."""
        assert len(sequences) <= len(self._tables), "a batch has more sequences than there are copies"
        copy_ids: list[int] = [s.page_ids.copy_id for s in sequences]  # type: ignore[attr-defined]
        num_wanted = copy_ids.count(NO_COPY) - len(self._free)
        last_sent = np.array(self._last_sent)
        last_sent[[copy_id for copy_id in copy_ids if copy_id != NO_COPY]] = _FREE
        # Many at once, because the search takes longer than a step's other work.
        oldest = np.argsort(last_sent)[: max(num_wanted, len(self._tables) // 8)]
        freed: list[int] = oldest[last_sent[oldest] != _FREE].tolist()
        for copy_id in freed:
            if (table := self._table(copy_id)) is not None:
                table.copy_id = NO_COPY
        self._forget(freed)

    def _forget(self, copy_ids: list[int]) -> None:
        for copy_id in copy_ids:
            self._release(copy_id)
        is_lost = np.isin(self._decoded[_COPY], copy_ids)
        self._decoded[_COPY, is_lost] = NO_COPY
        self._has_lost |= bool(is_lost.any())

    def _release(self, copy_id: int) -> None:
        if self._tables[copy_id] is not None:
            self._tables[copy_id] = None
            self._last_sent[copy_id] = _FREE
            self._free.append(copy_id)

    def _send(self, states: Int32s, indices: "np.ndarray[Any, np.dtype[np.int64]]") -> TableUpdates:
        """Returns all that the copies lack. Args: indices: sequences whose copies are too short."""
        copy_ids: list[int] = states[_COPY].take(indices).tolist()
        if not copy_ids:
            return _NO_UPDATES
        tables, num_sent, num_batches = self._tables, self._num_sent, self._num_batches
        last_sent = self._last_sent
        page_ids = array("i")
        firsts, lengths = [], []
        for copy_id in copy_ids:
            reference = tables[copy_id]
            assert reference is not None
            table = reference()
            assert table is not None
            first, length = num_sent[copy_id], len(table)
            firsts.append(first)
            lengths.append(length)
            num_sent[copy_id] = length
            last_sent[copy_id] = num_batches
            page_ids.extend(table[first:])
        # One array takes less time than three.
        joined, num = numbers(copy_ids + firsts + lengths), len(copy_ids)
        first_ids, table_lens = joined[num : 2 * num], joined[2 * num :]
        states[_ROOM].put(indices, table_lens * self._page_size)
        return TableUpdates(joined[:num], first_ids, table_lens - first_ids, np.frombuffer(page_ids, np.int32))
