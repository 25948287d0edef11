"""Plans for latent_kernels.py: work items and merges. Needs no GPU."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tandem.engine.attention.page_tables import Int64s, page_tables
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.token_sequence import TokenSequence

Int32s = np.ndarray[Any, np.dtype[np.int32]]

# Tokens per step of a kernel; parts are multiples of it.
BLOCK = 64
ITEM_SIZE = 8
MERGE_SIZE = 4
MAX_PARTS = 128
# Share of programs that may be without a part; else each computes up to two.
MAX_IDLE = 0.15
# Tokens of a part where tiles are as many as programs.
FULL_PART = 1024
MIN_TILE_ROWS, MAX_TILE_ROWS = 16, 64
# Items of quantized latents that a multiprocessor computes at once, if their tiles have at most so many rows
# (latent_stream.py).
STREAMS, MAX_STREAM_ROWS = 2, 32
# Rows of the parts that a decoded sequence may have in a large batch: a long one beside short ones ends sooner.
PART_ROWS = 128


class LatentPlan(NamedTuple):
    """
    Attributes:
        items: ((1 + max_items) * ITEM_SIZE,); first the number of items, then of each: first row, number of rows,
            position of a token less its index, index of the sequence's first page, first token, token behind the last,
            part (-1: the only one of its tile).
        merges: (num_tiles * MERGE_SIZE,); of each tile: first row, number of rows, first part, number of parts. Empty
            if all tiles have one part.
        pages: page ids of all sequences.
        num_parts: of tiles that have several.
    """

    items: Int32s
    merges: Int32s
    pages: Int32s
    num_parts: int

    @property
    def arrays(self) -> tuple[Int32s, Int32s, Int32s]:
        return self.items, self.merges, self.pages


class LatentPlans:
    """Makes plans for forward passes of one size.

    The cut into parts depends on this size and on the sequence alone, not on the other sequences.

    Attributes:
        tile_rows: rows of a tile.
        num_programs: that compute items side by side.
        most_parts: of a tile.
    """

    def __init__(
        self,
        num_tokens: int,
        num_heads: int,
        tile_rows: int,
        num_programs: int,
        *,
        num_tiles: int,
        min_parts: int = 1,
    ) -> None:
        """
        Args:
            num_tokens: queries of a forward pass, with padding.
            num_tiles: about as many as they have.
            min_parts: parts that a long sequence may have even if tiles are more than programs.
        """
        self._num_tokens = num_tokens
        self._num_heads = num_heads
        self.tile_rows = tile_rows
        self.num_programs = num_programs
        num_parts = num_programs // num_tiles
        if num_programs - num_parts * num_tiles > MAX_IDLE * num_programs:
            num_parts = 2 * num_programs // num_tiles
        self.most_parts = max(min_parts, min(MAX_PARTS, num_parts))
        self._least_share = min(FULL_PART, max(BLOCK, _whole_blocks(FULL_PART * num_tiles // num_programs)))

    def max_tiles(self, num_sequences: int) -> int:
        """Args: num_sequences: upper bound, padding included."""
        of_token = -(-self._num_heads // self.tile_rows)
        return min(self._num_tokens * of_token, num_sequences + self._num_tokens * self._num_heads // self.tile_rows)

    def max_parts(self, num_sequences: int) -> int:
        return self.max_tiles(num_sequences) * self.most_parts if self.most_parts > 1 else 0

    def build(
        self, layout: PageLayout, sequences: Sequence[TokenSequence], num_padding: int = 0, dummy_page: int = 0
    ) -> LatentPlan:
        """Plans the sequences' new tokens, in their order, then padding, which sees one token of the dummy page."""
        pages, first_pages = page_tables(layout, sequences)
        cached = np.array([s.cached_len for s in sequences] + [0] * bool(num_padding), np.int64)
        new = np.array([s.device_len for s in sequences] + [num_padding] * bool(num_padding), np.int64) - cached
        if num_padding:
            first_pages.append(len(pages))
            pages.append(dummy_page)
        first_tokens = new.cumsum() - new
        num_rows = new * self._num_heads
        # Of each tile: its sequence, its first row in it, number of rows, tokens that it sees, and parts.
        of, number = _numbered(-(-num_rows // self.tile_rows))
        first = number * self.tile_rows
        rows = np.minimum(self.tile_rows, num_rows[of] - first)
        seen = cached[of] + (first + rows - 1) // self._num_heads + 1
        if num_padding:
            seen[of == len(sequences)] = 1
        share = _whole_blocks(-(-seen // np.minimum(self.most_parts, -(-seen // self._least_share))))
        num_parts = -(-seen // share)
        kept = np.where(num_parts > 1, num_parts, 0)
        first_part = kept.cumsum() - kept
        first_row = first_tokens[of] * self._num_heads + first
        # Of each item: its tile, its number in it, and tokens.
        tile, part = _numbered(num_parts)
        start = part * share[tile]
        end = np.minimum(start + share[tile], seen[tile])
        columns = (
            first_row[tile],
            rows[tile],
            (cached - first_tokens)[of[tile]],
            np.array(first_pages, np.int64)[of[tile]],
            start,
            end,
            np.where(kept[tile] > 0, first_part[tile] + part, -1),
        )
        items = np.zeros((1 + len(tile), ITEM_SIZE), np.int32)
        items[0, 0] = len(tile)
        # The longest first, so that programs end together.
        order = np.argsort(start - end, kind="stable")
        for place, column in enumerate(columns):
            items[1:, place] = column[order]
        num_kept = int(kept.sum())
        merges = np.stack((first_row, rows, first_part, num_parts), axis=1) if num_kept else np.zeros(0)
        return LatentPlan(
            items.reshape(-1), merges.astype(np.int32).reshape(-1), np.frombuffer(pages, np.int32), num_kept
        )

    def extended(self, plan: LatentPlan, num_sequences: int) -> LatentPlan:
        """Returns the plan in arrays of the largest size. Args: num_sequences: upper bound, padding included."""
        num_tiles = self.max_tiles(num_sequences)
        items = np.zeros((1 + num_tiles * self.most_parts) * ITEM_SIZE, np.int32)
        items[: len(plan.items)] = plan.items
        merges = np.zeros(num_tiles * MERGE_SIZE if self.most_parts > 1 else 0, np.int32)
        merges[: len(plan.merges)] = plan.merges
        return plan._replace(items=items, merges=merges)


def decode_plans(num_rows: int, num_heads: int, num_multiprocessors: int, is_quantized: bool = False) -> LatentPlans:
    """Args: num_rows: tokens of a step; is_quantized: latents are."""
    tile_rows = MIN_TILE_ROWS
    while tile_rows < min(num_heads, MAX_TILE_ROWS):
        tile_rows *= 2
    num_tiles = num_rows * -(-num_heads // tile_rows)
    num_programs = num_multiprocessors * (STREAMS if is_quantized and tile_rows <= MAX_STREAM_ROWS else 1)
    return LatentPlans(
        num_rows, num_heads, tile_rows, num_programs, num_tiles=num_tiles, min_parts=PART_ROWS // tile_rows
    )


def prompt_plans(num_tokens: int, num_heads: int, num_programs: int) -> LatentPlans:
    num_tiles = max(1, num_tokens * num_heads // MAX_TILE_ROWS)
    return LatentPlans(num_tokens, num_heads, MAX_TILE_ROWS, num_programs, num_tiles=num_tiles)


def _numbered(counts: Int64s) -> tuple[Int64s, Int64s]:
    """Returns the index of each element's group, and its number in it. Args: counts: elements of each group."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - np.repeat(counts.cumsum() - counts, counts)


def _whole_blocks(num_tokens: Any) -> Any:
    return -(-num_tokens // BLOCK) * BLOCK
