"""Plans that cut long prefixes into parts, for short prompt pieces. Needs no GPU.

FlashInfer's kernel for Hopper gives each tile of queries and head to one multiprocessor, for all tokens before it. Few
new tokens leave most multiprocessors idle. So all new tokens attend to each part as to a sequence of its own.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.token_sequence import TokenSequence

# Largest forward pass that may have parts. More new tokens occupy most multiprocessors anyway.
MAX_TOKENS = 256
# Of a forward pass: parts, and new tokens counted once for each of their parts. FlashInfer plans for longer with more.
MAX_PARTS = 8
MAX_ROWS = 1024
# Time per work item, and of copies, merge and a layer's share of the plan, in tokens that one work item attends to:
# 13.5 ns each on an H200.
ITEM_COST = 500
CUT_COST = 1350
# Time with parts relative to time without, at most.
MAX_SHARE = 0.8
# Per new token: the row in its sequence's first part, rows from part to part, number of parts.
ENTRY_SIZE = 3

Int32s = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class CutRule:
    """
    Attributes:
        tile_rows: rows of queries per work item.
        num_sms: multiprocessors.
    """

    num_q_heads: int
    num_kv_heads: int
    tile_rows: int
    num_sms: int

    def num_parts(self, num_new: int, prefix_len: int, num_tokens: int) -> int:
        """Returns the number of parts of a sequence's prefix, from its own lengths and the forward pass's size; 0: the
        prefix stays whole.

        The parts of all sequences are at most MAX_PARTS, with at most MAX_ROWS rows.

        Args:
            num_new: new tokens of the sequence.
            num_tokens: of the forward pass, with padding.
        """
        num_waves = self._num_waves(-(-num_new // self.tile_rows) * self.num_q_heads)
        longest = MAX_SHARE * num_waves * (prefix_len + num_new) - CUT_COST - num_waves * num_new
        # Parts have a row for each query head of a key head: their queries need no order.
        num_tiles = -(-num_new * (self.num_q_heads // self.num_kv_heads) // self.tile_rows)
        best = 0
        for parts in range(2, min(MAX_PARTS * num_new // num_tokens, MAX_ROWS // num_tokens) + 1):
            num_waves = self._num_waves(num_tiles * self.num_kv_heads * parts)
            if (cost := num_waves * (-(-prefix_len // parts) + ITEM_COST)) < longest:
                best, longest = parts, cost
        return best

    def _num_waves(self, num_items: int) -> int:
        return -(-num_items // self.num_sms)


class PrefixParts(NamedTuple):
    """
    Attributes:
        num_cut_pages: each sequence's leading pages that are in parts, 0 without parts.
        rows: first row of each part, then their number.
        pages: page ids of all parts, all full.
        first_pages: index of each part's first page, then their number.
        table: (MAX_TOKENS * ENTRY_SIZE,) int32; 0 for tokens without parts, and behind the last token.
    """

    num_cut_pages: list[int]
    rows: list[int]
    pages: "array[int]"
    first_pages: list[int]
    table: Int32s

    @property
    def num_parts(self) -> int:
        return len(self.rows) - 1


def cut_prefixes(
    rule: CutRule, layout: KvHeadLayout, sequences: Sequence[TokenSequence], num_tokens: int
) -> PrefixParts:
    """Cuts between pages. Args: num_tokens: of the forward pass, with padding, at most MAX_TOKENS."""
    num_cut_pages: list[int] = []
    rows = [0]
    pages = array("i")
    first_pages = [0]
    table = np.zeros((MAX_TOKENS, ENTRY_SIZE), np.int32)
    token = 0
    for s in sequences:
        num_pages = s.cached_len // layout.page_size
        wanted = rule.num_parts(s.extend_len, num_pages * layout.page_size, num_tokens)
        is_cut = 0 < wanted <= num_pages
        num_cut_pages.append(num_pages if is_cut else 0)
        if is_cut:
            size = -(-num_pages // wanted)
            ends = [*range(size, num_pages, size), num_pages]
            new = table[token : token + s.extend_len]
            new[:, 0] = np.arange(rows[-1], rows[-1] + s.extend_len)
            new[:, 1:] = s.extend_len, len(ends)
            first_pages += [len(pages) + end for end in ends]
            pages.extend(s.page_ids[:num_pages])
            rows += [rows[-1] + s.extend_len * number for number in range(1, len(ends) + 1)]
        token += s.extend_len
    return PrefixParts(num_cut_pages, rows, pages, first_pages, table.reshape(-1))
