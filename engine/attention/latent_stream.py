"""Attention of tiles of queries over quantized latents, in Gluon: needs the tensor cores of compute capability 9.

Tensor cores multiply no numbers of 8 bits by queries of 16. So one group of warps reads blocks and expands them in shared
memory, two blocks at most, while others multiply.
"""

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
from tandem.engine.attention.latent_plan import BLOCK, ITEM_SIZE

STAGES = gl.constexpr(2)
# Blocks that are on their way into the L2 cache.
AHEAD = gl.constexpr(3)
LARGEST = gl.constexpr(65504.0)
PRODUCER_REGISTERS = 168


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
    num_warps: int = 4,
) -> None:
    latents, keys = pages
    num_heads, _, kv_rank = q.shape
    _attend_stream[(num_programs,)](
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
        scale,
        kv_scale,
        q.stride(0),
        q_rope.stride(0),
        q_rope.stride(1),
        NUM_HEADS=num_heads,
        KV_RANK=kv_rank,
        ROPE_DIM=keys.shape[3],
        PAGE_SIZE=latents.shape[2],
        ROW=latents.stride(2),
        ROWS=parts.shape[1],
        BLOCK=BLOCK,
        ITEM=ITEM_SIZE,
        REGISTERS=PRODUCER_REGISTERS,
        launch_pdl=True,
        num_warps=num_warps,
    )


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
    BLOCK: gl.constexpr = latents.shape[1]
    KV_RANK: gl.constexpr = latents.shape[2]
    WARPS: gl.constexpr = gl.num_warps()
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    KEY_COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    FETCH: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
    TOKENS: gl.constexpr = gl.SliceLayout(1, COPY)
    KEY_TOKENS: gl.constexpr = gl.SliceLayout(1, KEY_COPY)
    FETCHED: gl.constexpr = gl.SliceLayout(1, FETCH)
    r = gl.arange(0, KV_RANK, layout=gl.SliceLayout(0, COPY))[None, :]
    d = gl.arange(0, keys.shape[2], layout=gl.SliceLayout(0, KEY_COPY))[None, :]
    num_items = gl.load(items)
    count = 0
    for number in range(gl.program_id(0), num_items, gl.num_programs(0)):
        item = items + (1 + number) * ITEM
        item_pages = pages + gl.load(item + 3)
        start = gl.load(item + 4)
        end = gl.load(item + 5)
        page = pages_of(item_pages, start, end, PAGE_SIZE, BLOCK, TOKENS)
        fetched_page = pages_of(item_pages, start, end, PAGE_SIZE, BLOCK, FETCHED)
        if number == gl.program_id(0):
            prefetch(base, fetched_page, start, page_stride, PAGE_SIZE, ROW, BLOCK, FETCH)
        for ahead in gl.static_range(1, AHEAD):
            fetched_page = pages_of(item_pages, start + ahead * BLOCK, end, PAGE_SIZE, BLOCK, FETCHED)
            if start + ahead * BLOCK < end:
                prefetch(base, fetched_page, start + ahead * BLOCK, page_stride, PAGE_SIZE, ROW, BLOCK, FETCH)
        fetched_page = pages_of(item_pages, start + AHEAD * BLOCK, end, PAGE_SIZE, BLOCK, FETCHED)
        wait_for_kernel_before()
        for first in range(start, end, BLOCK):
            token = first + gl.arange(0, BLOCK, layout=TOKENS)
            exists = token < end
            row = base + (page.to(gl.int64) * page_stride + token % PAGE_SIZE * ROW)
            stored = gl.load(row[:, None] + r, mask=exists[:, None], other=0.0)
            key_row = gl.convert_layout(row + KV_RANK, KEY_TOKENS).to(gl.pointer_type(keys.dtype), bitcast=True)
            key = gl.load(key_row[:, None] + d, mask=gl.convert_layout(exists, KEY_TOKENS)[:, None], other=0.0)
            if first + AHEAD * BLOCK < end:
                prefetch(base, fetched_page, first + AHEAD * BLOCK, page_stride, PAGE_SIZE, ROW, BLOCK, FETCH)
            page = pages_of(item_pages, first + BLOCK, end, PAGE_SIZE, BLOCK, TOKENS)
            fetched_page = pages_of(item_pages, first + (AHEAD + 1) * BLOCK, end, PAGE_SIZE, BLOCK, FETCHED)
            stage = count % STAGES
            mbarrier.wait(free.index(stage), (count // STAGES) % 2 ^ 1)
            latents.index(stage).store(stored.to(latents.dtype))
            keys.index(stage).store(key)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(ready.index(stage), count=1)
            count += 1


@gluon.jit
def _consume(  # type: ignore[no-untyped-def]
    q,
    q_rope,
    out,
    parts,
    log_sums,
    items,
    scale,
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
):
    BLOCK: gl.constexpr = latents.shape[1]
    KV_RANK: gl.constexpr = latents.shape[2]
    ROPE_DIM: gl.constexpr = keys.shape[2]
    ROWS: gl.constexpr = queries.shape[0]
    DTYPE: gl.constexpr = keys.dtype
    COMPUTED: gl.constexpr = latents.dtype
    GROUPS: gl.constexpr = gl.num_warps() // 4
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, ROWS // GROUPS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * GROUPS, 1], [16, ROWS, 16])
    SCORE_ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    SUM_ROW: gl.constexpr = gl.SliceLayout(0, SUMS)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4 * GROUPS, 1], [1, 0])
    num_items = gl.load(items)
    count = 0
    wait_for_kernel_before()
    for number in range(gl.program_id(0), num_items, gl.num_programs(0)):
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
        query = query.to(gl.float32) * (scale * kv_scale)
        query = gl.where(query > LARGEST, LARGEST, gl.where(query < -LARGEST, -LARGEST, query)).to(COMPUTED)
        queries.store(query)
        rope_place = q_rope + (token * rope_token_stride + head * rope_head_stride)[:, None] + d
        turned.store(gl.load(rope_place, mask=exists, other=0.0))
        fence_async_shared()
        seen = gl.minimum(end, first_row // NUM_HEADS + to_position + 1)
        position = (first_row + gl.arange(0, ROWS, layout=SCORE_ROW)) // NUM_HEADS + to_position
        acc = gl.zeros([KV_RANK, ROWS], gl.float32, SUMS)
        top = gl.full([ROWS], float("-inf"), gl.float32, SCORE_ROW)
        totals = gl.zeros([BLOCK, ROWS], gl.float32, SCORES)
        for first in range(start, end, BLOCK):
            stage = count % STAGES
            mbarrier.wait(ready.index(stage), (count // STAGES) % 2)
            latent = latents.index(stage)
            scores = warpgroup_mma(
                latent,
                queries.permute((1, 0)),
                gl.zeros([BLOCK, ROWS], gl.float32, SCORES),
                use_acc=False,
                is_async=True,
            )
            of_keys = warpgroup_mma(
                keys.index(stage),
                turned.permute((1, 0)),
                gl.zeros([BLOCK, ROWS], gl.float32, SCORES),
                use_acc=False,
                is_async=True,
            )
            scores, of_keys = warpgroup_mma_wait(0, deps=[scores, of_keys])
            scores = scores + of_keys * scale
            if first + BLOCK > seen:
                key_position = first + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, SCORES))
                scores = gl.where(key_position[:, None] <= position[None, :], scores, float("-inf"))
            new_top = gl.maximum(top, gl.max(scores, axis=0))
            subtracted = gl.where(new_top == float("-inf"), 0.0, new_top)
            weights = gl.exp2(scores - subtracted[None, :])
            shrink = gl.exp2(top - subtracted)
            totals = totals * shrink[None, :] + weights
            weighed.store(weights.to(COMPUTED))
            fence_async_shared()
            acc = acc * gl.convert_layout(shrink, SUM_ROW)[None, :]
            acc = warpgroup_mma(latent.permute((1, 0)), weighed, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            gl.thread_barrier()
            mbarrier.arrive(free.index(stage), count=1)
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
    REGISTERS: gl.constexpr,
):
    DTYPE: gl.constexpr = q.dtype.element_ty
    COMPUTED: gl.constexpr = gl.float16
    latents = gl.allocate_shared_memory(
        COMPUTED, [STAGES, BLOCK, KV_RANK], gl.NVMMASharedLayout.get_default_for([BLOCK, KV_RANK], COMPUTED)
    )
    keys = gl.allocate_shared_memory(
        DTYPE, [STAGES, BLOCK, ROPE_DIM], gl.NVMMASharedLayout.get_default_for([BLOCK, ROPE_DIM], DTYPE)
    )
    queries = gl.allocate_shared_memory(
        COMPUTED, [ROWS, KV_RANK], gl.NVMMASharedLayout.get_default_for([ROWS, KV_RANK], COMPUTED)
    )
    turned = gl.allocate_shared_memory(
        DTYPE, [ROWS, ROPE_DIM], gl.NVMMASharedLayout.get_default_for([ROWS, ROPE_DIM], DTYPE)
    )
    weighed = gl.allocate_shared_memory(
        COMPUTED, [BLOCK, ROWS], gl.NVMMASharedLayout.get_default_for([BLOCK, ROWS], COMPUTED)
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
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
                ),
            ),
            (
                _produce,
                (rows + layer_offset, items, pages, page_stride, latents, keys, ready, free, PAGE_SIZE, ROW, ITEM),
            ),
        ],
        [4],
        [REGISTERS],
    )
