"""What the kernel paged_decode.cu is told of a decode step: sequences cut into items of about the same length, and page
tables. No part of it needs a GPU."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.attention.layout import KvHeadLayout
from engine.attention.page_tables import page_tables
from engine.token_sequence import TokenSequence

# A warp takes so many tokens at a time.
TILE = 16
# A block has so many warps; it has more where a step has so few sequences that a block has to be done soon.
WARPS = 4
WARPS_OF_FEW = 8
# A multiprocessor runs so many blocks of WARPS at once.
BLOCKS_PER_SM = 2
# Each of many sequences may be cut into so many items.
NUM_CUTS = (1, 2, 3)
# A plan has so many numbers before its items, and an item has so many. Threads load four at a time.
HEAD_SIZE = 4
ITEM_SIZE = 8


class DecodePlan:
    """Makes plans for one pool and one type of GPU.

    A plan is int32 numbers side by side:

    - HEAD_SIZE, the first of them the number of items;
    - ITEM_SIZE for each item, see paged_decode.cu: room for as many items as there can be;
    - for each row the new token's position;
    - the page tables.
    """

    def __init__(self, layout: KvHeadLayout, num_sms: int, dummy_page: int) -> None:
        """Args: dummy_page: where rows of padding read and write."""
        self._layout = layout
        self._num_sms = num_sms
        self._dummy_page = dummy_page
        # So many items run at once.
        self._wave = -(-BLOCKS_PER_SM * num_sms // layout.num_kv_heads)

    def num_warps(self, num_rows: int) -> int:
        """Of a block."""
        return WARPS_OF_FEW if 4 * num_rows * self._layout.num_kv_heads <= self._num_sms else WARPS

    def max_items(self, num_rows: int) -> int:
        """No plan of so many rows has more. More rows may have fewer."""
        return num_rows + self._target_items(num_rows)

    def size(self, num_rows: int, num_pages: int) -> int:
        """Numbers in a plan whose page tables have so many pages together, that of padding among them."""
        return self.positions(num_rows).stop + num_pages

    def positions(self, num_rows: int) -> slice:
        """Where the positions are in a plan."""
        begin = HEAD_SIZE + ITEM_SIZE * self.max_items(num_rows)
        return slice(begin, begin + num_rows)

    def build(self, sequences: Sequence[TokenSequence], num_rows: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
        """For a step over `sequences`; rows beyond them are one token on the dummy page."""
        num_padding = num_rows - len(sequences)
        tables, starts = page_tables(self._layout, sequences)
        starts += [len(tables)] * num_padding
        tables.append(self._dummy_page)
        lengths = np.ones(num_rows, dtype=np.int32)
        lengths[: len(sequences)] = [s.device_len for s in sequences]
        # Items are of about the same length, and those of a row of the same, for a short one at a row's end would take
        # a block as well. They are whole turns of a block, so there may be fewer of them in the end.
        turn = self.num_warps(num_rows) * TILE
        shares = np.maximum(1, np.rint(lengths * (self._target_items(num_rows) / lengths.sum()))).astype(np.int32)
        stretches = -(-lengths // (shares * turn)) * turn
        num_items = -(-lengths // stretches)
        total = int(num_items.sum())
        # Rounded shares are at most one more than the exact ones for each row.
        assert total <= self.max_items(num_rows)

        plan = np.zeros(self.size(num_rows, len(tables)), dtype=np.int32)
        plan[0] = total
        rows = np.repeat(np.arange(num_rows), num_items)
        numbers = np.arange(total) - np.repeat(num_items.cumsum() - num_items, num_items)
        begins = numbers * stretches[rows]
        ends = np.minimum(begins + stretches[rows], lengths[rows])
        columns = (rows, begins, ends, lengths[rows], np.array(starts)[rows], numbers, num_items[rows])
        items = plan[HEAD_SIZE : HEAD_SIZE + total * ITEM_SIZE].reshape(total, ITEM_SIZE)
        for place, column in enumerate(columns):
            items[:, place] = column
        plan[self.positions(num_rows)] = lengths - 1
        plan[self.positions(num_rows).stop :] = tables
        return plan

    def _target_items(self, num_rows: int) -> int:
        """About as many items as sequences are cut into, all together: one wave; or where there are more sequences than
        that, so many for each that the last wave is as full as can be."""
        if num_rows <= self._wave:
            return self._wave
        return num_rows * min(NUM_CUTS, key=lambda cuts: -(-num_rows * cuts // self._wave) / cuts)
