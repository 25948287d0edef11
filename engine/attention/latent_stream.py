"""Attention of tiles of queries over quantized latents, in Gluon: needs the tensor cores of compute capability 9.

Tensor cores multiply no numbers of 8 bits by queries of 16, so latents are expanded in shared memory. A multiprocessor
works on two items at once: while one waits for its next block to be expanded, the other multiplies.
"""

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tandem.engine.attention.latent_copies import (
    pages_of,
    prefetch,
    release_kernel_behind,
    wait_for_kernel_before,
)
from tandem.engine.attention.latent_layout import LatentPages
from tandem.engine.attention.latent_plan import BLOCK, ITEM_SIZE, STREAMS
from tandem.engine.attention.latent_tiles import DEPENDENT

# Blocks of an item that are on their way into the L2 cache.
AHEAD = gl.constexpr(2)
# Of float16.
LARGEST = gl.constexpr(65504.0)
# Of each of the three groups.
WARPS = 4
# Of a thread that multiplies and of one that expands, by rows of a tile: 504 with those of the other that multiplies.
WORKER_REGISTERS = {16: (184, 136), 32: (200, 104)}


def attend_stream(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    pages: LatentPages,
    layer: int,
    items: torch.Tensor,
    page_ids: torch.Tensor,
    parts: torch.Tensor,
    log_sums: torch.Tensor,
    scale: float,
    kv_scale: float,
    num_programs: int,
    out: torch.Tensor,
) -> None:
    """As latent_tiles.attend_tiles, for tiles of at most MAX_STREAM_ROWS rows.

    Args:
        num_programs: STREAMS times the blocks.
    """
    latents, keys = pages
    num_heads, _, kv_rank = q.shape
    tile_rows = parts.shape[1]
    consumer, producer = WORKER_REGISTERS[tile_rows]
    # Exact factor of the rotated queries, which have neither the latents' scale nor their dtype.
    power = 2.0 ** math.floor(math.log2(scale))
    _attend_stream[(num_programs // STREAMS,)](
        q,
        q_rope,
        out,
        parts,
        log_sums,
        latents,
        items,
        page_ids,
        latents.stride(0),
        layer * latents.stride(1),
        scale / power,
        power,
        kv_scale,
        q.stride(0),
        q_rope.stride(0),
        q_rope.stride(1),
        NUM_HEADS=num_heads,
        KV_RANK=kv_rank,
        ROPE_DIM=keys.shape[3],
        PAGE_SIZE=latents.shape[2],
        ROW=latents.stride(2),
        ROWS=tile_rows,
        BLOCK=BLOCK,
        ITEM=ITEM_SIZE,
        CONSUMER_REGISTERS=consumer,
        PRODUCER_REGISTERS=producer,
        launch_pdl=DEPENDENT,
        num_warps=WARPS,
    )


@gluon.jit
def _open(items, number, num_items, ITEM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns an item's first token, the token behind its last, and its first page; nothing behind the last item."""
    exists = number < num_items
    item = items + (1 + number) * ITEM
    first = gl.load(item + 4, mask=exists, other=0)
    end = gl.load(item + 5, mask=exists, other=0)
    return first, end, gl.load(item + 3, mask=exists, other=0)


@gluon.jit
def _fetch(base, pages, first, end, page_stride, PAGE_SIZE: gl.constexpr, ROW: gl.constexpr, BLOCK: gl.constexpr):  # type: ignore[no-untyped-def]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [gl.num_warps(), 1], [1, 0])
    if first < end:
        page = pages_of(pages, first, end, PAGE_SIZE, BLOCK, gl.SliceLayout(1, LAYOUT))
        prefetch(base, page, first, page_stride, PAGE_SIZE, ROW, BLOCK, LAYOUT)


@gluon.jit
def _fill(  # type: ignore[no-untyped-def]
    latents,
    keys,
    ready,
    free,
    count,
    base,
    pages,
    first,
    end,
    page_stride,
    PAGE_SIZE: gl.constexpr,
    ROW: gl.constexpr,
):
    """Reads a block, then waits for the buffer's release and expands the block there. Tokens behind the end become
    zeros: unused slots may hold NaN."""
    BLOCK: gl.constexpr = latents.shape[0]
    KV_RANK: gl.constexpr = latents.shape[1]
    # A warp reads 4 rows of 128 bytes at a time.
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    KEY_COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    TOKENS: gl.constexpr = gl.SliceLayout(1, COPY)
    KEY_TOKENS: gl.constexpr = gl.SliceLayout(1, KEY_COPY)
    page = pages_of(pages, first, end, PAGE_SIZE, BLOCK, TOKENS)
    token = first + gl.arange(0, BLOCK, layout=TOKENS)
    exists = token < end
    row = base + (page.to(gl.int64) * page_stride + token % PAGE_SIZE * ROW)
    r = gl.arange(0, KV_RANK, layout=gl.SliceLayout(0, COPY))
    stored = gl.load(row[:, None] + r[None, :], mask=exists[:, None], other=0.0)
    key_row = gl.convert_layout(row + KV_RANK, KEY_TOKENS).to(gl.pointer_type(keys.dtype), bitcast=True)
    d = gl.arange(0, keys.shape[1], layout=gl.SliceLayout(0, KEY_COPY))
    key = gl.load(key_row[:, None] + d[None, :], mask=gl.convert_layout(exists, KEY_TOKENS)[:, None], other=0.0)
    _fetch(base, pages, first + AHEAD * BLOCK, end, page_stride, PAGE_SIZE, ROW, BLOCK)
    mbarrier.wait(free, count % 2 ^ 1)
    latents.store(stored.to(latents.dtype))
    keys.store(key)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _produce(  # type: ignore[no-untyped-def]
    base,
    items,
    pages,
    page_stride,
    latents,
    keys,
    ready,
    free,
    PAGE_SIZE: gl.constexpr,
    ROW: gl.constexpr,
    ITEM: gl.constexpr,
):
    """Fills the buffers of both streams in turn."""
    BLOCK: gl.constexpr = latents.shape[1]
    num_items = gl.load(items)
    step = 2 * gl.num_programs(0)
    number_a = 2 * gl.program_id(0)
    number_b = number_a + 1
    first_a, end_a, place_a = _open(items, number_a, num_items, ITEM)
    first_b, end_b, place_b = _open(items, number_b, num_items, ITEM)
    for ahead in gl.static_range(AHEAD):
        _fetch(base, pages + place_a, first_a + ahead * BLOCK, end_a, page_stride, PAGE_SIZE, ROW, BLOCK)
        _fetch(base, pages + place_b, first_b + ahead * BLOCK, end_b, page_stride, PAGE_SIZE, ROW, BLOCK)
    # Plans are older than the kernel before, the newest latents are its.
    wait_for_kernel_before()
    count_a = 0
    count_b = 0
    while (first_a < end_a) | (first_b < end_b):
        if first_a < end_a:
            _fill(
                latents.index(0),
                keys.index(0),
                ready.index(0),
                free.index(0),
                count_a,
                base,
                pages + place_a,
                first_a,
                end_a,
                page_stride,
                PAGE_SIZE,
                ROW,
            )
            count_a += 1
            first_a += BLOCK
            if first_a >= end_a:
                number_a += step
                first_a, end_a, place_a = _open(items, number_a, num_items, ITEM)
        if first_b < end_b:
            _fill(
                latents.index(1),
                keys.index(1),
                ready.index(1),
                free.index(1),
                count_b,
                base,
                pages + place_b,
                first_b,
                end_b,
                page_stride,
                PAGE_SIZE,
                ROW,
            )
            count_b += 1
            first_b += BLOCK
            if first_b >= end_b:
                number_b += step
                first_b, end_b, place_b = _open(items, number_b, num_items, ITEM)


@gluon.jit
def _zero():  # type: ignore[no-untyped-def]
    """Returns a zero that the compiler does not know."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _consume(  # type: ignore[no-untyped-def]
    q,
    q_rope,
    out,
    parts,
    log_sums,
    items,
    scale,
    power,
    kv_scale,
    head_stride,
    rope_token_stride,
    rope_head_stride,
    latents,
    keys,
    queries,
    turned,
    weighed,
    ready,
    free,
    NUM_HEADS: gl.constexpr,
    ITEM: gl.constexpr,
    STREAM: gl.constexpr,
):
    """Computes every item of a stream. Tokens are rows of the products, and queries columns."""
    BLOCK: gl.constexpr = latents.shape[1]
    KV_RANK: gl.constexpr = latents.shape[2]
    ROPE_DIM: gl.constexpr = keys.shape[2]
    ROWS: gl.constexpr = queries.shape[1]
    DTYPE: gl.constexpr = keys.dtype
    COMPUTED: gl.constexpr = latents.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    SCORE_ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    SUM_ROW: gl.constexpr = gl.SliceLayout(0, SUMS)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    num_items = gl.load(items)
    count = 0
    wait_for_kernel_before()
    for number in range(2 * gl.program_id(0) + STREAM, num_items, 2 * gl.num_programs(0)):
        item = items + (1 + number) * ITEM
        first_row = gl.load(item)
        num_rows = gl.load(item + 1)
        to_position = gl.load(item + 2)
        start = gl.load(item + 4)
        end = gl.load(item + 5)
        part = gl.load(item + 6)
        i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
        row = first_row + i
        token = (row // NUM_HEADS).to(gl.int64)
        head = (row % NUM_HEADS).to(gl.int64)
        exists = (i < num_rows)[:, None]
        r = gl.arange(0, KV_RANK, layout=gl.SliceLayout(0, COPY))[None, :]
        d = gl.arange(0, ROPE_DIM, layout=gl.SliceLayout(0, COPY))[None, :]
        query = gl.load(q + (head * head_stride + token * KV_RANK)[:, None] + r, mask=exists, other=0.0)
        query = query.to(gl.float32) * (power * kv_scale)
        query = gl.where(query > LARGEST, LARGEST, gl.where(query < -LARGEST, -LARGEST, query)).to(COMPUTED)
        queries.index(STREAM).store(query)
        rope_place = q_rope + (token * rope_token_stride + head * rope_head_stride)[:, None] + d
        turned.index(STREAM).store((gl.load(rope_place, mask=exists, other=0.0).to(gl.float32) * power).to(DTYPE))
        fence_async_shared()
        seen = gl.minimum(end, first_row // NUM_HEADS + to_position + 1)
        position = (first_row + gl.arange(0, ROWS, layout=SCORE_ROW)) // NUM_HEADS + to_position
        acc = gl.zeros([KV_RANK, ROWS], gl.float32, SUMS)
        top = gl.full([ROWS], float("-inf"), gl.float32, SCORE_ROW)
        totals = gl.zeros([BLOCK, ROWS], gl.float32, SCORES)
        for first in range(start, end, BLOCK):
            mbarrier.wait(ready.index(STREAM), count % 2)
            # Addresses of constants would stay in registers over the loop.
            stream = STREAM + _zero()
            latent = latents.index(stream)
            scores = warpgroup_mma(
                latent,
                queries.index(stream).permute((1, 0)),
                gl.zeros([BLOCK, ROWS], gl.float32, SCORES),
                use_acc=False,
                is_async=True,
            )
            scores = warpgroup_mma(keys.index(stream), turned.index(stream).permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores]) * scale
            if first + BLOCK > seen:
                key_position = first + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, SCORES))
                scores = gl.where(key_position[:, None] <= position[None, :], scores, float("-inf"))
            new_top = gl.maximum(top, gl.max(scores, axis=0))
            subtracted = gl.where(new_top == float("-inf"), 0.0, new_top)
            weights = gl.exp2(scores - subtracted[None, :])
            shrink = gl.exp2(top - subtracted)
            totals = totals * shrink[None, :] + weights
            weighed.index(STREAM).store(weights.to(COMPUTED))
            fence_async_shared()
            acc = acc * gl.convert_layout(shrink, SUM_ROW)[None, :]
            acc = warpgroup_mma(latent.permute((1, 0)), weighed.index(stream), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            gl.thread_barrier()
            mbarrier.arrive(free.index(STREAM), count=1)
            top = new_top
            count += 1
        total = gl.sum(totals, axis=0)
        divisor = gl.where(total > 0.0, total, 1.0)
        acc = acc * gl.convert_layout(kv_scale / divisor, SUM_ROW)[None, :]
        column = gl.arange(0, ROWS, layout=SUM_ROW)
        is_used = (column < num_rows)[None, :]
        rank = gl.arange(0, KV_RANK, layout=gl.SliceLayout(1, SUMS))[:, None]
        if part < 0:
            out_row = first_row + column
            out_place = (out_row % NUM_HEADS).to(gl.int64) * head_stride + (out_row // NUM_HEADS).to(gl.int64) * KV_RANK
            gl.store(out + out_place[None, :] + rank, acc.to(DTYPE), mask=is_used)
        else:
            first_place = part.to(gl.int64) * ROWS
            gl.store(parts + (first_place + column)[None, :] * KV_RANK + rank, acc, mask=is_used)
            score_column = gl.arange(0, ROWS, layout=SCORE_ROW)
            gl.store(log_sums + first_place + score_column, top + gl.log2(total), mask=score_column < num_rows)


@gluon.jit
def _attend_stream(  # type: ignore[no-untyped-def]
    q,
    q_rope,
    out,
    parts,
    log_sums,
    rows,
    items,
    pages,
    page_stride,
    layer_offset,
    scale,
    power,
    kv_scale,
    head_stride,
    rope_token_stride,
    rope_head_stride,
    NUM_HEADS: gl.constexpr,
    KV_RANK: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROW: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK: gl.constexpr,
    ITEM: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    DTYPE: gl.constexpr = q.dtype.element_ty
    # Numbers of 8 bits become float16 in one instruction for two.
    COMPUTED: gl.constexpr = gl.float16
    latents = gl.allocate_shared_memory(
        COMPUTED, [2, BLOCK, KV_RANK], gl.NVMMASharedLayout.get_default_for([BLOCK, KV_RANK], COMPUTED)
    )
    keys = gl.allocate_shared_memory(
        DTYPE, [2, BLOCK, ROPE_DIM], gl.NVMMASharedLayout.get_default_for([BLOCK, ROPE_DIM], DTYPE)
    )
    queries = gl.allocate_shared_memory(
        COMPUTED, [2, ROWS, KV_RANK], gl.NVMMASharedLayout.get_default_for([ROWS, KV_RANK], COMPUTED)
    )
    turned = gl.allocate_shared_memory(
        DTYPE, [2, ROWS, ROPE_DIM], gl.NVMMASharedLayout.get_default_for([ROWS, ROPE_DIM], DTYPE)
    )
    weighed = gl.allocate_shared_memory(
        COMPUTED, [2, BLOCK, ROWS], gl.NVMMASharedLayout.get_default_for([BLOCK, ROWS], COMPUTED)
    )
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stream in gl.static_range(2):
        mbarrier.init(ready.index(stream), count=1)
        mbarrier.init(free.index(stream), count=1)
    # It may request its weights.
    release_kernel_behind()
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    q,
                    q_rope,
                    out,
                    parts,
                    log_sums,
                    items,
                    scale,
                    power,
                    kv_scale,
                    head_stride,
                    rope_token_stride,
                    rope_head_stride,
                    latents,
                    keys,
                    queries,
                    turned,
                    weighed,
                    ready,
                    free,
                    NUM_HEADS,
                    ITEM,
                    0,
                ),
            ),
            (
                _consume,
                (
                    q,
                    q_rope,
                    out,
                    parts,
                    log_sums,
                    items,
                    scale,
                    power,
                    kv_scale,
                    head_stride,
                    rope_token_stride,
                    rope_head_stride,
                    latents,
                    keys,
                    queries,
                    turned,
                    weighed,
                    ready,
                    free,
                    NUM_HEADS,
                    ITEM,
                    1,
                ),
            ),
            (
                _produce,
                (rows + layer_offset, items, pages, page_stride, latents, keys, ready, free, PAGE_SIZE, ROW, ITEM),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
