"""Plans for paged_decode.cu: work items per block, and page tables. Needs no GPU."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.page_tables import page_tables
from tandem.engine.token_sequence import TokenSequence

# Tokens per warp and turn.
TILE = 16
# Fixed cost (queries, reduction over warps), in turns of a block.
ITEM_COST = 0.5
# Multiples of four: threads load four numbers at a time.
HEAD_SIZE = 4
ITEM_SIZE = 8


class DecodeBlocks(NamedTuple):
    """
    Attributes:
        cut: items begin at multiples of it, in tokens.
    """

    num_warps: int
    num_per_sm: int
    cut: int

    @property
    def turn(self) -> int:
        """Tokens that the warps of a block process at a time."""
        return self.num_warps * TILE

    @property
    def turn_cuts(self) -> int:
        """The same, in cuts."""
        return self.turn // self.cut


class DecodePlan:
    """Makes plans for one pool and one type of GPU.

    A plan is a row of int32 numbers:

    - HEAD_SIZE numbers, first the number of blocks per key head;
    - ITEM_SIZE numbers per item (see paged_decode.cu), with room for max_items;
    - each block's first item, then the number of items, padded to a multiple of four;
    - each row's new position;
    - the page tables.
    """

    def __init__(self, layout: KvHeadLayout, num_sms: int, dummy_page: int) -> None:
        self._layout = layout
        self._num_sms = num_sms
        self._dummy_page = dummy_page
        # Fastest on an H200 with head_dim 128: as many loads in flight as registers hold.
        is_large = layout.head_dim > 64 and not layout.quantized_to
        self._blocks_of_many = DecodeBlocks(num_warps=4, num_per_sm=3 if is_large else 4, cut=4 * TILE)
        # Few sequences: more warps end each block sooner, and finer cuts give all blocks an equal share.
        self._blocks_of_few = DecodeBlocks(num_warps=8, num_per_sm=1 if is_large else 2, cut=TILE)

    def blocks(self, num_rows: int) -> DecodeBlocks:
        few = self._blocks_of_few
        is_few = num_rows * self._layout.num_kv_heads <= few.num_per_sm * self._num_sms
        return few if is_few else self._blocks_of_many

    def max_blocks(self, num_rows: int) -> int:
        """Blocks per key head: one wave."""
        return max(1, self.blocks(num_rows).num_per_sm * self._num_sms // self._layout.num_kv_heads)

    def max_items(self, num_rows: int) -> int:
        """Upper bound; not monotonic."""
        return num_rows + self.max_blocks(num_rows) - 1

    def size(self, num_rows: int, num_pages: int) -> int:
        """Numbers in a plan; num_pages includes the padding's."""
        return self.positions(num_rows).stop + num_pages

    def positions(self, num_rows: int) -> slice:
        begin = self._first_items(num_rows) + (self.max_blocks(num_rows) + 4) // 4 * 4
        return slice(begin, begin + num_rows)

    def build(self, sequences: Sequence[TokenSequence], num_rows: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
        """Plans a step; padding rows are one token on the dummy page."""
        num_padding = num_rows - len(sequences)
        tables, table_starts = page_tables(self._layout, sequences)
        table_starts += [len(tables)] * num_padding
        tables.append(self._dummy_page)
        lengths = np.ones(num_rows, dtype=np.int32)
        lengths[: len(sequences)] = [s.device_len for s in sequences]
        blocks = self.blocks(num_rows)
        num_cuts = -(-lengths // blocks.cut)
        ends = num_cuts.cumsum()
        row_starts = ends - num_cuts
        num_turns = -(-lengths // blocks.turn)
        # Each block has at least one turn.
        num_blocks = min(self.max_blocks(num_rows), int(num_turns.sum()))
        item_cost = ITEM_COST * blocks.turn_cuts
        block_starts = _even_starts(num_cuts, row_starts, num_blocks, item_cost)
        if block_starts is None:
            costs = num_turns * blocks.turn_cuts + item_cost
            block_starts = _union([0], _cuts(num_cuts, ends, costs, num_blocks, item_cost))
        starts = _union(row_starts, block_starts)
        total = len(starts)
        assert total <= self.max_items(num_rows)
        rows = row_starts.searchsorted(starts, side="right") - 1
        first_of_row = starts.searchsorted([*row_starts, ends[-1]])
        begins, item_ends = starts - row_starts[rows], np.append(starts[1:], ends[-1]) - row_starts[rows]

        positions = self.positions(num_rows)
        plan = np.zeros(positions.stop + len(tables), dtype=np.int32)
        plan[0] = len(block_starts)
        columns: tuple[np.ndarray[Any, Any], ...] = (
            rows,
            begins * blocks.cut,
            np.minimum(item_ends * blocks.cut, lengths[rows]),
            lengths[rows],
            np.array(table_starts)[rows],
            np.arange(total) - first_of_row[rows],
            (first_of_row[1:] - first_of_row[:-1])[rows],
        )
        items = plan[HEAD_SIZE : HEAD_SIZE + total * ITEM_SIZE].reshape(total, ITEM_SIZE)
        for place, column in enumerate(columns):
            items[:, place] = column
        first_items = plan[self._first_items(num_rows) :]
        first_items[: len(block_starts)] = starts.searchsorted(block_starts)
        first_items[len(block_starts)] = total
        plan[positions] = lengths - 1
        plan[positions.stop :] = tables
        return plan

    def _first_items(self, num_rows: int) -> int:
        return HEAD_SIZE + ITEM_SIZE * self.max_items(num_rows)


def _even_starts(
    num_cuts: "np.ndarray[Any, Any]", row_starts: "np.ndarray[Any, Any]", num_blocks: int, item_cost: float
) -> "np.ndarray[Any, Any] | None":
    """Gives each row blocks of its own, which then have one item each.

    Args:
        num_cuts, row_starts: cuts of each row and of the rows before it; (num_rows,).

    Returns:
        The cuts at which the blocks begin; None if the largest block would cost more than blocks that share rows.
    """
    if len(num_cuts) > num_blocks:
        return None
    total = int(num_cuts.sum())
    shares = np.maximum(1, num_cuts * num_blocks // total)
    num_shares = int(shares.sum())
    # A block that shares rows has one item more.
    if num_shares > num_blocks or (-(-num_cuts // shares)).max() > total / num_blocks + item_cost:
        return None
    numbers = np.arange(num_shares) - np.repeat(shares.cumsum() - shares, shares)
    return np.repeat(row_starts, shares) + numbers * np.repeat(num_cuts, shares) // np.repeat(shares, shares)


def _cuts(
    num_cuts: "np.ndarray[Any, Any]",
    ends: "np.ndarray[Any, Any]",
    costs: "np.ndarray[Any, Any]",
    num_blocks: int,
    item_cost: float,
) -> "np.ndarray[Any, Any]":
    """Cuts at which the blocks after the first begin; rows may share a block.

    Args:
        num_cuts, ends: cuts of each row and their cumulative sum; (num_rows,).
        costs: of each row, in cuts.
    """
    cost_ends = costs.cumsum()
    places = np.arange(1, num_blocks) * (cost_ends[-1] / num_blocks)
    rows = np.searchsorted(cost_ends, places, side="right")
    within = np.rint(places - (cost_ends - costs)[rows] - item_cost).astype(np.int64)
    cuts = (ends - num_cuts)[rows] + np.clip(within, 0, num_cuts[rows])
    return cuts[cuts < ends[-1]]


def _union(one: "np.ndarray[Any, Any] | list[int]", other: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Takes half the time of np.union1d."""
    numbers = np.concatenate((one, other))
    numbers.sort()
    is_new = np.ones(len(numbers), dtype=bool)
    np.not_equal(numbers[1:], numbers[:-1], out=is_new[1:])
    return numbers[is_new]
