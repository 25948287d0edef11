"""Attention of decode steps with drafts as Triton kernels. Works as triton_kernels.py does.

A program computes one item: some tokens of a sequence, for the query heads of one key-value head of up to eight new
tokens. So each key and value is read once for all of these.
"""

import torch
import triton
import triton.language as tl

from tandem.engine.attention.draft_plan import ITEM_SIZE as _ITEM_SIZE
from tandem.engine.attention.draft_plan import ROW_SIZE as _ROW_SIZE
from tandem.engine.attention.scales import KvScales
from tandem.engine.attention.triton_kernels import BLOCK_ELEMENTS, MIN_ROWS, NUM_STAGES, attend_tokens, log2_scale

ITEM_SIZE, ROW_SIZE = tl.constexpr(_ITEM_SIZE), tl.constexpr(_ROW_SIZE)
# New tokens of a sequence that share a read, and rows of a program at most: tokens times heads of a group.
MAX_TILE, MAX_ROWS = 8, 128
# Above it, a program has 8 warps.
FEW_ROWS = 32
# Merged at a time.
PARTS = 16


def tile_of(group: int) -> int:
    """Returns the new tokens of a tile. Args: group: query heads per key-value head."""
    return max(1, min(MAX_TILE, MAX_ROWS // group))


def block_of(head_dim: int) -> int:
    """Returns the tokens that a program reads at a time."""
    return BLOCK_ELEMENTS // head_dim


def decode_drafts(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    items: torch.Tensor,
    rows: torch.Tensor,
    pages: torch.Tensor,
    kv_scales: KvScales,
    out: torch.Tensor,
) -> torch.Tensor:
    """Causal attention of each sequence's new tokens to all its tokens.

    Args:
        q: (num_rows, num_q_heads, head_dim), contiguous.
        pool: as KvHeadLayout.view, contiguous, of q's dtype or quantized.
        items, rows, pages: of DraftPlan, on the device.
        out: like q, overwritten and returned.
    """
    num_rows, num_q_heads, head_dim = q.shape
    _, _, _, page_size, num_kv_heads, _ = pool.shape
    group = num_q_heads // num_kv_heads
    tile_rows = max(MIN_ROWS, triton.next_power_of_2(tile_of(group) * group))
    max_items = len(items) // _ITEM_SIZE
    shape = (max_items, num_kv_heads, tile_rows)
    parts = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
    log_sums = torch.empty(shape, dtype=torch.float32, device=q.device)
    # Heads vary fastest, to read neighbors in memory together.
    _attend_item[(num_kv_heads, max_items)](
        q,
        out,
        parts,
        log_sums,
        pool,
        items,
        pages,
        pool.stride(0),
        layer * pool.stride(1),
        log2_scale(head_dim) * kv_scales.keys[layer],
        kv_scales.values[layer],
        PAGE_SIZE=page_size,
        NUM_KV=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        ROWS=tile_rows,
        BLOCK=block_of(head_dim),
        num_warps=4 if tile_rows <= FEW_ROWS else 8,
        num_stages=NUM_STAGES,
    )
    _merge_items[(num_q_heads, num_rows)](
        parts,
        log_sums,
        out,
        rows,
        NUM_KV=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        ROWS=tile_rows,
        PARTS=PARTS,
        num_warps=2,
    )
    return out


@triton.jit
def _attend_item(  # type: ignore[no-untyped-def]
    q,
    out,
    parts,
    log_sums,
    pool,
    items,
    pages,
    page_stride,
    layer_offset,
    scale,
    v_scale,
    PAGE_SIZE: tl.constexpr,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row i of the program is query i // GROUP of the tile and head i % GROUP.

    Writes `out` if the item is alone, else parts (max_items, NUM_KV, ROWS, HEAD_DIM) and log_sums (max_items, NUM_KV,
    ROWS).
    """
    kv_head = tl.program_id(0)
    number = tl.program_id(1)
    item = items + number * ITEM_SIZE
    num_queries = tl.load(item + 1)
    if num_queries == 0:
        return
    first_row = tl.load(item).to(tl.int64)
    first_position = tl.load(item + 2)
    item_pages = pages + tl.load(item + 3)
    begin = tl.load(item + 4)
    end = tl.load(item + 5)
    is_alone = tl.load(item + 6)
    i = tl.arange(0, ROWS)
    d = tl.arange(0, HEAD_DIM)
    is_query = (i < num_queries * GROUP)[:, None]
    head = ((first_row + i // GROUP) * NUM_KV + kv_head) * GROUP + i % GROUP  # (ROWS,) int64, of all rows' heads
    place = head[:, None] * HEAD_DIM + d[None, :]
    queries = tl.load(q + place, mask=is_query, other=0.0)
    acc, top, total = attend_tokens(
        queries,
        tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32),
        tl.full([ROWS], float("-inf"), dtype=tl.float32),
        tl.zeros([ROWS], dtype=tl.float32),
        first_position + i // GROUP,
        pool + layer_offset + kv_head * HEAD_DIM,
        item_pages,
        page_stride,
        begin,
        end,
        scale,
        True,
        PAGE_SIZE,
        NUM_KV,
        HEAD_DIM,
        BLOCK,
    )
    acc = acc * (v_scale / total)[:, None]
    if is_alone != 0:
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=is_query)
    else:
        row = (number.to(tl.int64) * NUM_KV + kv_head) * ROWS + i  # (ROWS,) of all items' rows
        tl.store(parts + row[:, None] * HEAD_DIM + d[None, :], acc, mask=is_query)
        tl.store(log_sums + row, top + tl.log2(total), mask=i < num_queries * GROUP)


@triton.jit
def _merge_items(  # type: ignore[no-untyped-def]
    parts,
    log_sums,
    out,
    rows,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merges one row and query head of a tile with several items."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    num_items = tl.load(rows + row * ROW_SIZE + 1)
    if num_items == 1:
        return
    first_item = tl.load(rows + row * ROW_SIZE).to(tl.int64)
    query = tl.load(rows + row * ROW_SIZE + 2)
    d = tl.arange(0, HEAD_DIM)
    p = tl.arange(0, PARTS)
    at = (first_item * NUM_KV + head // GROUP) * ROWS + query * GROUP + head % GROUP
    acc = tl.zeros([HEAD_DIM], dtype=tl.float32)
    top = tl.full([1], float("-inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    for first in range(0, num_items, PARTS):
        exists = first + p < num_items
        place = at + (first + p) * (NUM_KV * ROWS)  # (PARTS,) int64
        log_sum = tl.load(log_sums + place, mask=exists, other=float("-inf"))
        part = tl.load(parts + place[:, None] * HEAD_DIM + d[None, :], mask=exists[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(log_sum, 0))
        weight = tl.exp2(log_sum - new_top)
        shrink = tl.exp2(top - new_top)
        acc = acc * shrink + tl.sum(part * weight[:, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        top = new_top
    place_out = (row.to(tl.int64) * (NUM_KV * GROUP) + head) * HEAD_DIM + d
    tl.store(out + place_out, (acc / total).to(out.dtype.element_ty))
