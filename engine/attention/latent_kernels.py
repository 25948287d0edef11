"""Attention over pages of latents as Triton kernels.

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

from tandem.engine.attention.latent_plan import BLOCK, ITEM_SIZE, MERGE_SIZE

# Page ids load a block ahead of latents, and latents a block ahead of use.
NUM_STAGES = 3
NUM_WARPS = 8
# Numbers of parts that a program merges at once.
MERGED_NUMBERS = 4096
# Programs that merge few tiles take fewer columns each, so that there are more of them.
FEW_TILES, FEW_COLUMNS = 64, 128


def attend(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    items: torch.Tensor,
    merges: torch.Tensor,
    pages: torch.Tensor,
    parts: torch.Tensor,
    log_sums: torch.Tensor,
    scale: float,
    num_programs: int,
    out: torch.Tensor,
) -> None:
    """Causal attention of the items' rows to the latents in pages.

    Args:
        q: (num_heads, num_tokens, kv_rank), contiguous: absorbed queries.
        q_rope: (num_tokens, num_heads, rope_dim), rotated; any strides but the last.
        pool: as LatentLayout.view, contiguous.
        items: ((1 + max_items) * ITEM_SIZE,) int32, of LatentPlan.
        merges: (num_tiles * MERGE_SIZE,) int32, of LatentPlan; empty if no tile has several parts.
        pages: int32 page ids of all sequences.
        parts: (max_parts, tile_rows, kv_rank) float32, overwritten.
        log_sums: (max_parts, tile_rows) float32, overwritten.
        scale: factor of the scores.
        out: as q, overwritten: weighted sums of latents.
    """
    num_heads, _, kv_rank = q.shape
    _, tile_rows, _ = parts.shape
    page_size, token_dim = pool.shape[2:]
    _attend[(num_programs,)](
        q,
        q_rope,
        out,
        parts,
        log_sums,
        pool,
        items,
        pages,
        pool.stride(0),
        layer * pool.stride(1),
        scale * math.log2(math.e),
        q.stride(0),
        q_rope.stride(0),
        q_rope.stride(1),
        NUM_HEADS=num_heads,
        KV_RANK=kv_rank,
        ROPE_DIM=token_dim - kv_rank,
        PAGE_SIZE=page_size,
        ROWS=tile_rows,
        BLOCK=BLOCK,
        ITEM=ITEM_SIZE,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    if len(merges):
        num_tiles = len(merges) // MERGE_SIZE
        columns = min(kv_rank, FEW_COLUMNS) if num_tiles <= FEW_TILES else kv_rank
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
            PARTS=MERGED_NUMBERS // columns,
            MERGE=MERGE_SIZE,
            num_warps=4,
        )


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q,
    q_rope,
    out,
    parts,
    log_sums,
    pool,
    items,
    pages,
    page_stride,
    layer_offset,
    scale,
    head_stride,
    rope_token_stride,
    rope_head_stride,
    NUM_HEADS: tl.constexpr,
    KV_RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ITEM: tl.constexpr,
):
    """Computes every num_programs-th item.

    Tokens are rows of the products, and queries columns: few heads then fill a tensor core without padding.
    """
    num_items = tl.load(items)
    i = tl.arange(0, ROWS)
    r = tl.arange(0, KV_RANK)
    d = tl.arange(0, ROPE_DIM)
    for number in range(tl.program_id(0), num_items, tl.num_programs(0)):
        item = items + (1 + number) * ITEM
        first_row = tl.load(item)
        num_rows = tl.load(item + 1)
        to_position = tl.load(item + 2)
        item_pages = pages + tl.load(item + 3)
        start = tl.load(item + 4)
        end = tl.load(item + 5)
        part = tl.load(item + 6)
        row = first_row + i  # (ROWS,) of all queries' heads
        token = (row // NUM_HEADS).to(tl.int64)
        head = row % NUM_HEADS
        exists = i < num_rows
        # (KV_RANK, ROWS) and (ROPE_DIM, ROWS).
        q_place = (head * head_stride + token * KV_RANK)[None, :] + r[:, None]
        queries = tl.load(q + q_place, mask=exists[None, :], other=0.0)
        turned = tl.load(
            q_rope + (token * rope_token_stride + head * rope_head_stride)[None, :] + d[:, None],
            mask=exists[None, :],
            other=0.0,
        )
        position = row // NUM_HEADS + to_position
        # Blocks visible to every query need no mask.
        seen = tl.minimum(end, first_row // NUM_HEADS + to_position + 1)
        middle = tl.maximum(start, start + (seen - start) // BLOCK * BLOCK)
        acc, top, total = _attend_blocks(
            queries,
            turned,
            tl.zeros([KV_RANK, ROWS], dtype=tl.float32),
            tl.full([ROWS], float("-inf"), dtype=tl.float32),
            tl.zeros([ROWS], dtype=tl.float32),
            position,
            pool + layer_offset,
            item_pages,
            page_stride,
            start,
            middle,
            end,
            scale,
            False,
            KV_RANK,
            ROPE_DIM,
            PAGE_SIZE,
            BLOCK,
        )
        acc, top, total = _attend_blocks(
            queries,
            turned,
            acc,
            top,
            total,
            position,
            pool + layer_offset,
            item_pages,
            page_stride,
            middle,
            end,
            end,
            scale,
            True,
            KV_RANK,
            ROPE_DIM,
            PAGE_SIZE,
            BLOCK,
        )
        # A row of a later token alone may see nothing of the part.
        acc = acc * (1.0 / tl.where(total > 0.0, total, 1.0))[None, :]
        if part < 0:
            tl.store(out + q_place, acc.to(out.dtype.element_ty), mask=exists[None, :])
        else:
            place = part.to(tl.int64) * ROWS + i
            tl.store(parts + place[None, :] * KV_RANK + r[:, None], acc, mask=exists[None, :])
            tl.store(log_sums + place, top + tl.log2(total), mask=exists)


@triton.jit
def _attend_blocks(  # type: ignore[no-untyped-def]
    queries,
    turned,
    acc,
    top,
    total,
    position,
    latents,
    pages,
    page_stride,
    start,
    stop,
    end,
    scale,
    MASKED: tl.constexpr,
    KV_RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Continues attention over a sequence's tokens from `start` to `stop`.

    Args:
        queries, turned: (KV_RANK, ROWS) and (ROPE_DIM, ROWS).
        acc, top, total: float32 weighted sum of latents (KV_RANK, ROWS), largest score (ROWS,) and sum of weights
            (ROWS,) so far. Scores are base 2, weights relative to `top`.
        position: (ROWS,) int32.
        latents: pointer to the layer's latents in the pool's first page.
        end: the sequence's tokens that exist.
        MASKED: True if a query may not see every token, or the last block is partial.
    """
    r = tl.arange(0, KV_RANK)[None, :]
    d = tl.arange(0, ROPE_DIM)[None, :]
    for first in range(start, stop, BLOCK):
        token = first + tl.arange(0, BLOCK)  # (BLOCK,)
        if MASKED:
            exists = token < end
            page = tl.load(pages + token // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
        else:
            page = tl.load(pages + token // PAGE_SIZE).to(tl.int64)
        source = latents + (page * page_stride + token % PAGE_SIZE * (KV_RANK + ROPE_DIM))[:, None]
        if MASKED:
            latent = tl.load(source + r, mask=exists[:, None], other=0.0)
            key = tl.load(source + KV_RANK + d, mask=exists[:, None], other=0.0)
        else:
            latent = tl.load(source + r)
            key = tl.load(source + KV_RANK + d)
        scores = tl.dot(latent, queries)
        scores = tl.dot(key, turned, scores) * scale  # (BLOCK, ROWS)
        if MASKED:
            scores = tl.where(token[:, None] <= position[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        # Of a row that has seen no token yet.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[None, :])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 0)
        acc = tl.dot(tl.trans(latent), weights.to(latent.dtype), acc * shrink[None, :])
        top = new_top
    return acc, top, total


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
    place = row % NUM_HEADS * head_stride + (row // NUM_HEADS).to(tl.int64) * KV_RANK
    tl.store(out + place + r, (acc / total).to(out.dtype.element_ty))
