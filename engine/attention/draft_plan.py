"""Plans for draft_kernels.py: tiles of a sequence's new tokens, cut into work items. Needs no GPU."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tandem.engine.attention.page_tables import Int64s, page_tables
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.token_sequence import TokenSequence

Int32s = np.ndarray[Any, np.dtype[np.int32]]

# Numbers of an item, and of a row.
ITEM_SIZE, ROW_SIZE = 8, 4


class DraftPlan(NamedTuple):
    """
    Attributes:
        slots: (num_rows,) page * page_size + offset of each new token; padding goes to the dummy page.
        positions: (num_rows,) 0 for padding.
        items: (max_items * ITEM_SIZE,); of each item: the tile's first row, its number of queries (0: no item), its
            first position, index in `pages` of the sequence's first, first token, token behind the last, and 1 if it is
            the only one of its tile.
        rows: (num_rows * ROW_SIZE,); of each row: its tile's first item, their number, and the row's index in the tile.
        pages: page ids of all sequences, then the dummy page.
    """

    slots: Int64s
    positions: Int32s
    items: Int32s
    rows: Int32s
    pages: Int32s


class DraftPlans:
    """Makes plans for one pool and one type of GPU."""

    def __init__(self, layout: PageLayout, dummy_page: int, *, tile: int, block: int, num_programs: int) -> None:
        """
        Args:
            tile: new tokens of a sequence that share reads of keys and values.
            block: items begin at multiples of it, in tokens.
            num_programs: items that fill the GPU.
        """
        self._layout = layout
        self._dummy_page = dummy_page
        self._tile = tile
        self._block = block
        self._num_programs = num_programs

    def max_items(self, num_rows: int) -> int:
        return num_rows + self._num_programs

    def build(self, sequences: Sequence[TokenSequence], num_rows: int) -> DraftPlan:
        """Plans a step. Args: num_rows: new tokens, drafts included, and padding, which sees one token."""
        num_new = np.array([s.extend_len for s in sequences], np.int64)
        num_known = int(num_new.sum())
        pages, first_pages = page_tables(self._layout, sequences)
        page_size = self._layout.page_size
        slots = np.full(num_rows, self._dummy_page * page_size, np.int64)
        positions = np.zeros(num_rows, np.int32)
        if sequences:
            # Without a loop over the sequences, because the device idles meanwhile.
            of_row, number = _numbered(num_new)
            at = np.array([s.cached_len for s in sequences], np.int64)[of_row] + number
            page = np.array(first_pages, np.int64)[of_row] + at // page_size
            slots[:num_known] = np.asarray(pages)[page].astype(np.int64) * page_size + at % page_size
            positions[:num_known] = at
        # Tiles of each sequence, then one for each row of padding.
        sequence, number = _numbered(_quotient(num_new, self._tile))
        padding = np.arange(num_known, num_rows)
        first_in_sequence = number * self._tile
        first_row = np.concatenate(((num_new.cumsum() - num_new)[sequence] + first_in_sequence, padding))
        num_queries = np.concatenate((np.minimum(self._tile, num_new[sequence] - first_in_sequence), padding * 0 + 1))
        first_page = np.concatenate((np.array(first_pages, np.int64)[sequence], padding * 0 + len(pages)))
        pages.append(self._dummy_page)
        first_position = positions[first_row].astype(np.int64)

        # Each query sees the first token of each item, so items begin among the tokens that the first query sees.
        seen = first_position + 1
        num_blocks = _quotient(seen, self._block)
        share = _quotient(num_blocks.sum(), self._num_programs)
        # Items of a tile are equal, so that they end together.
        size = _quotient(num_blocks, _quotient(num_blocks, share))
        num_items = _quotient(num_blocks, size)
        size *= self._block
        first_item = num_items.cumsum() - num_items
        tile, part = _numbered(num_items)
        begin = part * size[tile]
        is_last = part == num_items[tile] - 1
        end = np.where(is_last, (first_position + num_queries)[tile], begin + size[tile])
        columns = (
            first_row[tile],
            num_queries[tile],
            first_position[tile],
            first_page[tile],
            begin,
            end,
            num_items[tile] == 1,
        )
        items = np.zeros((self.max_items(num_rows), ITEM_SIZE), np.int32)
        for place, column in enumerate(columns):
            items[: len(tile), place] = column
        of_row, query = _numbered(num_queries)
        rows = np.zeros((num_rows, ROW_SIZE), np.int32)
        rows[:, 0], rows[:, 1], rows[:, 2] = first_item[of_row], num_items[of_row], query
        return DraftPlan(slots, positions, items.reshape(-1), rows.reshape(-1), np.array(pages, np.int32))


def _quotient(x: Any, y: Any) -> Any:
    """Rounds up."""
    return -(-x // y)


def _numbered(counts: Int64s) -> tuple[Int64s, Int64s]:
    """Returns the index of each element's group, and its number in it. Args: counts: elements of each group."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - np.repeat(counts.cumsum() - counts, counts)
