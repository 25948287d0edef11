"""Paged attention as Triton kernels: split decode, and prefill with a cached prefix.

Any page size works, and NaN in unused slots has no effect. A program computes the query heads that share a key-value
head, and reads each key and value once. Softmax is online (Milakov and Gimelshein 2018,
https://arxiv.org/abs/1805.02867) in powers of 2. Splits are merged by log-sum-exp.
"""

import math

import torch
import triton
import triton.language as tl

from tandem.engine.attention.scales import KvScales

# 16 KiB of keys, and of values, per read.
BLOCK_ELEMENTS = 8192
MIN_ROWS = 16
# Queries times grouped heads: two warp groups of 64.
PREFILL_ROWS = 128
# Fills every multiprocessor and evens out the last wave.
DECODE_PROGRAMS_PER_SM = 4
MAX_SPLITS = 64
# Page ids load two blocks ahead of keys and values, which load two blocks ahead of use.
NUM_STAGES = 5


def num_decode_splits(num_rows: int, num_kv_heads: int, num_sms: int) -> int:
    """A power of 2, to compile few kernels."""
    wanted = max(1, DECODE_PROGRAMS_PER_SM * num_sms // (num_rows * num_kv_heads))
    return min(1 << (wanted.bit_length() - 1), MAX_SPLITS)


def queries_per_tile(num_q_heads: int, num_kv_heads: int) -> int:
    return PREFILL_ROWS // (num_q_heads // num_kv_heads)


def decode(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    positions: torch.Tensor,
    first_pages: torch.Tensor,
    pages: torch.Tensor,
    num_splits: int,
    kv_scales: KvScales,
    out: torch.Tensor,
) -> torch.Tensor:
    """Attention of one query per sequence to all its tokens.

    Args:
        q: (num_rows, num_q_heads, head_dim), contiguous.
        pool: as KvHeadLayout.view, contiguous, of q's dtype or quantized.
        positions: (num_rows,) int32, of the queries.
        first_pages: (num_rows,) int32, index in `pages` of each sequence's first.
        pages: int32 page ids of all sequences; may have unused entries at the end.
        out: like q, overwritten and returned.
    """
    num_rows, num_q_heads, head_dim = q.shape
    _, _, _, page_size, num_kv_heads, _ = pool.shape
    group = num_q_heads // num_kv_heads
    block = BLOCK_ELEMENTS // head_dim
    partial, log_sums = out, out
    if num_splits > 1:
        partial = torch.empty(num_rows, num_q_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
        log_sums = torch.empty(num_rows, num_q_heads, num_splits, dtype=torch.float32, device=q.device)
    # Heads vary fastest, to read neighbors in memory together.
    _decode[(num_kv_heads, num_rows, num_splits)](
        q,
        partial,
        log_sums,
        pool,
        positions,
        first_pages,
        pages,
        pool.stride(0),
        layer * pool.stride(1),
        log2_scale(head_dim) * kv_scales.keys[layer],
        kv_scales.values[layer],
        PAGE_SIZE=page_size,
        NUM_KV=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        ROWS=max(MIN_ROWS, triton.next_power_of_2(group)),
        BLOCK=block,
        IS_SPLIT=num_splits > 1,
        num_warps=4,
        num_stages=NUM_STAGES,
    )
    if num_splits > 1:
        _merge[(num_q_heads, num_rows)](
            partial, log_sums, out, positions, HEAD_DIM=head_dim, SPLITS=num_splits, BLOCK=block, num_warps=4
        )
    return out


def prefill(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    tiles: torch.Tensor,
    pages: torch.Tensor,
    kv_scales: KvScales,
    out: torch.Tensor,
) -> torch.Tensor:
    """Causal attention of each sequence's new tokens.

    Args:
        q: (num_tokens, num_q_heads, head_dim), contiguous.
        tiles: (num_tiles, 4) int32, each at most queries_per_tile queries of one sequence: first row in q, number of
            queries, first position, and index in `pages` of the sequence's first.
        pool, pages, kv_scales, out: as for decode.
    """
    _, num_q_heads, head_dim = q.shape
    _, _, _, page_size, num_kv_heads, _ = pool.shape
    _prefill[(num_kv_heads, len(tiles))](
        q,
        out,
        pool,
        tiles,
        pages,
        pool.stride(0),
        layer * pool.stride(1),
        log2_scale(head_dim) * kv_scales.keys[layer],
        kv_scales.values[layer],
        PAGE_SIZE=page_size,
        NUM_KV=num_kv_heads,
        GROUP=num_q_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        ROWS=PREFILL_ROWS,
        BLOCK=BLOCK_ELEMENTS // head_dim,
        num_warps=8,
        num_stages=NUM_STAGES,
    )
    return out


def log2_scale(head_dim: int) -> float:
    return math.log2(math.e) / math.sqrt(head_dim)


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    q,
    out,
    log_sums,
    pool,
    positions,
    first_pages,
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
    IS_SPLIT: tl.constexpr,
):
    """Computes one split of one sequence and key-value head.

    Writes (num_rows, num_q_heads, num_splits, head_dim), and with several splits log_sums (num_rows, num_q_heads,
    num_splits). An empty split writes nothing.
    """
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    num_tokens = tl.load(positions + row) + 1
    share = _tokens_per_split(num_tokens, num_splits, BLOCK)
    start = split * share
    if start >= num_tokens:
        return
    i = tl.arange(0, ROWS)
    d = tl.arange(0, HEAD_DIM)
    head = (row * NUM_KV + kv_head) * GROUP + i  # (ROWS,) of all sequences' heads
    is_head = (i < GROUP)[:, None]
    queries = tl.load(q + head[:, None] * HEAD_DIM + d[None, :], mask=is_head, other=0.0)
    acc, top, total = attend_tokens(
        queries,
        tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32),
        tl.full([ROWS], float("-inf"), dtype=tl.float32),
        tl.zeros([ROWS], dtype=tl.float32),
        tl.zeros([ROWS], dtype=tl.int32) + num_tokens - 1,
        pool + layer_offset + kv_head * HEAD_DIM,
        pages + tl.load(first_pages + row),
        page_stride,
        start,
        tl.minimum(start + share, num_tokens),
        scale,
        True,
        PAGE_SIZE,
        NUM_KV,
        HEAD_DIM,
        BLOCK,
    )
    place = head * num_splits + split
    acc = acc * (v_scale / total)[:, None]
    tl.store(out + place[:, None] * HEAD_DIM + d[None, :], acc.to(out.dtype.element_ty), mask=is_head)
    if IS_SPLIT:
        tl.store(log_sums + place, top + tl.log2(total), mask=i < GROUP)


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    partial,
    log_sums,
    out,
    positions,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1)
    head = row * tl.num_programs(0) + tl.program_id(0)
    num_tokens = tl.load(positions + row) + 1
    d = tl.arange(0, HEAD_DIM)
    split = tl.arange(0, SPLITS)
    is_written = split * _tokens_per_split(num_tokens, SPLITS, BLOCK) < num_tokens
    place = head * SPLITS + split
    log_sum = tl.load(log_sums + place, mask=is_written, other=float("-inf"))
    weight = tl.exp2(log_sum - tl.max(log_sum, 0))
    part = tl.load(partial + place[:, None] * HEAD_DIM + d[None, :], mask=is_written[:, None], other=0.0)
    merged = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + head * HEAD_DIM + d, merged.to(out.dtype.element_ty))


@triton.jit
def _prefill(  # type: ignore[no-untyped-def]
    q,
    out,
    pool,
    tiles,
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
    """Row i is query i // GROUP and head i % GROUP."""
    kv_head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 4
    first_token = tl.load(tile).to(tl.int64)
    num_queries = tl.load(tile + 1)
    first_position = tl.load(tile + 2)
    tile_pages = pages + tl.load(tile + 3)
    i = tl.arange(0, ROWS)
    d = tl.arange(0, HEAD_DIM)
    is_query = (i < num_queries * GROUP)[:, None]
    head = ((first_token + i // GROUP) * NUM_KV + kv_head) * GROUP + i % GROUP  # (ROWS,) int64, of all tokens' heads
    place = head[:, None] * HEAD_DIM + d[None, :]
    queries = tl.load(q + place, mask=is_query, other=0.0)
    position = first_position + i // GROUP
    kv = pool + layer_offset + kv_head * HEAD_DIM
    # Blocks visible to every query need no mask.
    seen_by_all = (first_position + 1) // BLOCK * BLOCK
    acc, top, total = attend_tokens(
        queries,
        tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32),
        tl.full([ROWS], float("-inf"), dtype=tl.float32),
        tl.zeros([ROWS], dtype=tl.float32),
        position,
        kv,
        tile_pages,
        page_stride,
        0,
        seen_by_all,
        scale,
        False,
        PAGE_SIZE,
        NUM_KV,
        HEAD_DIM,
        BLOCK,
    )
    acc, top, total = attend_tokens(
        queries,
        acc,
        top,
        total,
        position,
        kv,
        tile_pages,
        page_stride,
        seen_by_all,
        first_position + num_queries,
        scale,
        True,
        PAGE_SIZE,
        NUM_KV,
        HEAD_DIM,
        BLOCK,
    )
    acc = acc * (v_scale / total)[:, None]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=is_query)


@triton.jit
def _tokens_per_split(num_tokens, num_splits, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whole blocks: the last splits may be empty."""
    return tl.cdiv(tl.cdiv(num_tokens, num_splits), BLOCK) * BLOCK


@triton.jit
def attend_tokens(  # type: ignore[no-untyped-def]
    queries,
    acc,
    top,
    total,
    position,
    kv,
    pages,
    page_stride,
    start,
    end,
    scale,
    MASKED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Continues attention over a sequence's tokens from `start` to `end`.

    Args:
        queries: (ROWS, HEAD_DIM).
        acc, top, total: float32 weighted sum of values (ROWS, HEAD_DIM), largest score (ROWS,) and sum of weights
            (ROWS,) so far. Scores are base 2, weights relative to `top`.
        position: (ROWS,) int32; each query sees the token at `start` or already has a finite `top`.
        kv: pointer to the layer's and head's keys in the pool's first page.
        pages: pointer to the sequence's page ids.
        MASKED: True if a query may not see every token, or the last block is partial.
    """
    d = tl.arange(0, HEAD_DIM)[None, :]
    for first in range(start, end, BLOCK):
        token = first + tl.arange(0, BLOCK)  # (BLOCK,)
        if MASKED:
            exists = token < end
            page = tl.load(pages + token // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
        else:
            page = tl.load(pages + token // PAGE_SIZE).to(tl.int64)
        keys = kv + (page * page_stride + token % PAGE_SIZE * (NUM_KV * HEAD_DIM))[:, None] + d
        values = keys + PAGE_SIZE * NUM_KV * HEAD_DIM
        if MASKED:
            k = tl.load(keys, mask=exists[:, None], other=0.0)
            v = tl.load(values, mask=exists[:, None], other=0.0)
        else:
            k = tl.load(keys)
            v = tl.load(values)
        # Scales apply to scores and output instead.
        k = k.to(queries.dtype)
        v = v.to(queries.dtype)
        scores = tl.dot(queries, tl.trans(k)) * scale  # (ROWS, BLOCK)
        if MASKED:
            scores = tl.where(token[None, :] <= position[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    return acc, top, total
