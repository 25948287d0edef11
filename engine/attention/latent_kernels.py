"""Attention over pages of latents, as kernels in Gluon and Triton.

Queries are absorbed: a head's query is multiplied by its keys' projection, so all heads read the latents themselves
(DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.2). Rows of queries and heads, in this order, are cut into
tiles, and the tokens that a tile sees into parts; a work item is one part of one tile (latent_plan.py). Softmax is
online, in powers of 2. Parts are merged by log-sum-exp in their order.

Any page size works, and NaN in unused slots has no effect.
"""

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tandem.engine.attention.latent_layout import LatentPages
from tandem.engine.attention.latent_plan import MERGE_SIZE
from tandem.engine.attention.latent_tiles import DEPENDENT, attend_tiles

# Parts, and numbers of them all, that a program merges at once.
MERGED_PARTS, MERGED_NUMBERS = 32, 4096


def attend(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    pages: LatentPages,
    layer: int,
    items: torch.Tensor,
    merges: torch.Tensor,
    page_ids: torch.Tensor,
    parts: torch.Tensor,
    log_sums: torch.Tensor,
    most_parts: int,
    scale: float,
    num_programs: int,
    out: torch.Tensor,
    kv_scale: float = 1.0,
) -> None:
    """Causal attention of the items' rows to the latents in pages.

    Args:
        q: (num_heads, num_tokens, kv_rank), contiguous: absorbed queries.
        q_rope: (num_tokens, num_heads, rope_dim), rotated; any strides but the last.
        pages: of the pool; latents may be quantized.
        items: ((1 + max_items) * ITEM_SIZE,) int32, of LatentPlan.
        merges: (num_tiles * MERGE_SIZE,) int32, of LatentPlan; empty if no tile has several parts.
        page_ids: int32, of all sequences.
        parts: (max_parts, tile_rows, kv_rank) float32, overwritten.
        log_sums: (max_parts, tile_rows) float32, overwritten.
        most_parts: of LatentPlans; gives the order of sums.
        scale: factor of the scores.
        out: as q, overwritten: weighted sums of latents.
        kv_scale: of quantized latents.
    """
    attend_parts(q, q_rope, pages, layer, items, page_ids, parts, log_sums, scale, num_programs, out, kv_scale)
    if len(merges):
        num_heads, _, kv_rank = q.shape
        num_tiles, tile_rows = len(merges) // MERGE_SIZE, parts.shape[1]
        merged_parts = min(MERGED_PARTS, triton.next_power_of_2(most_parts))
        columns = min(kv_rank, MERGED_NUMBERS // merged_parts)
        _merge[(num_tiles, tile_rows, kv_rank // columns)](
            out,
            parts,
            log_sums,
            merges,
            q.stride(0),
            NUM_HEADS=num_heads,
            KV_RANK=kv_rank,
            ROWS=tile_rows,
            COLUMNS=columns,
            PARTS=merged_parts,
            MERGE=MERGE_SIZE,
            launch_pdl=DEPENDENT,
            num_warps=4,
        )


def attend_parts(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    pages: LatentPages,
    layer: int,
    items: torch.Tensor,
    page_ids: torch.Tensor,
    parts: torch.Tensor,
    log_sums: torch.Tensor,
    scale: float,
    num_programs: int,
    out: torch.Tensor,
    kv_scale: float = 1.0,
) -> None:
    """As `attend`, without merging parts: `out` has the rows that have one part."""
    scale *= math.log2(math.e)
    attend_tiles(q, q_rope, pages, layer, items, page_ids, parts, log_sums, scale, kv_scale, num_programs, out)


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    out,
    parts,
    log_sums,
    merges,
    head_stride,
    NUM_HEADS: tl.constexpr,
    KV_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Program (tile, row, columns); tiles of one part are already in `out`."""
    merge = merges + tl.program_id(0) * MERGE
    i = tl.program_id(1)
    first_row = tl.load(merge)
    num_rows = tl.load(merge + 1)
    first_part = tl.load(merge + 2).to(tl.int64)
    num_parts = tl.load(merge + 3)
    # Also where nothing is merged: the kernel behind must not start before the end of the one before.
    gdc_wait()
    if i >= num_rows or num_parts < 2:
        return
    r = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([COLUMNS], dtype=tl.float32)
    top = float("-inf")
    total = 0.0
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)
        exists = part < num_parts
        place = (first_part + part) * ROWS + i
        log_sum = tl.load(log_sums + place, mask=exists, other=float("-inf"))
        sums = tl.load(parts + place[:, None] * KV_RANK + r[None, :], mask=exists[:, None], other=0.0)
        # The first part of every tile is seen by all its rows, so the top is finite.
        new_top = tl.maximum(top, tl.max(log_sum, 0))
        weight = tl.exp2(log_sum - new_top)
        shrink = tl.exp2(top - new_top)
        acc = acc * shrink + tl.sum(sums * weight[:, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        top = new_top
    row = first_row + i
    place = (row % NUM_HEADS).to(tl.int64) * head_stride + (row // NUM_HEADS).to(tl.int64) * KV_RANK
    tl.store(out + place + r, (acc / total).to(out.dtype.element_ty))
