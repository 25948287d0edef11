"""Attention of tiles of queries over latents, in Gluon: needs the tensor cores of compute capability 9.

Shared memory has room for two blocks of latents, or for three quantized blocks and one that is expanded for the tensor
cores. While tensor cores multiply one, the next are copied. Triton's own pipeline does that from three blocks on.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from tandem.engine.attention.latent_copies import (
    copy,
    pages_of,
    prefetch,
    release_kernel_behind,
    wait_for_kernel_before,
)
from tandem.engine.attention.latent_layout import LatentPages
from tandem.engine.attention.latent_plan import BLOCK, ITEM_SIZE

# Starts while the kernel before still runs, and waits for its end (programmatic dependent launch).
DEPENDENT = True
# Of float16.
LARGEST = gl.constexpr(65504.0)
# Rows whose sums fit in the registers of one warpgroup. Few tokens, which leave most multiprocessors idle, take less
# time with two for more rows than the fewest.
MAX_ROWS_OF_GROUP, MAX_ROWS_OF_FEW_TOKENS = 32, 16
FEW_TOKENS = 4
# Blocks in shared memory. Quantized ones are small: few rows leave room for a third, which hides the memory's latency.
STAGES, QUANTIZED_STAGES = 2, 3


def attend_tiles(
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
    """As latent_kernels.attend, without merging parts. Args: scale: of scores in base 2."""
    latents, keys = pages
    num_heads, num_tokens, kv_rank = q.shape
    tile_rows = parts.shape[1]
    has_third = latents.dtype != keys.dtype and tile_rows <= MAX_ROWS_OF_GROUP
    max_rows = MAX_ROWS_OF_FEW_TOKENS if num_tokens <= FEW_TOKENS else MAX_ROWS_OF_GROUP
    _attend_tiles[(num_programs,)](
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
        ROWS=tile_rows,
        BLOCK=BLOCK,
        ITEM=ITEM_SIZE,
        STAGES=QUANTIZED_STAGES if has_third else STAGES,
        launch_pdl=DEPENDENT,
        num_warps=4 if tile_rows <= max_rows else 8,
    )


@gluon.jit
def _expand(stored, latents):  # type: ignore[no-untyped-def]
    """Converts a quantized block, without its scale. Every number of 8 bits is one of 16."""
    # Half a warp reads, and a quarter writes, 128 bytes of a row at a time.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    latents.store(stored.load(LAYOUT).to(latents.dtype))


@gluon.jit
def _zero():  # type: ignore[no-untyped-def]
    """Returns a zero that the compiler does not know. An address with it is not kept in registers over a loop."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _attend_tiles(  # type: ignore[no-untyped-def]
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
    STAGES: gl.constexpr,
):
    """Computes every num_programs-th item. Tokens are rows of the products, and queries columns."""
    DTYPE: gl.constexpr = q.dtype.element_ty
    STORED: gl.constexpr = rows.dtype.element_ty
    IS_QUANTIZED: gl.constexpr = STORED != DTYPE
    # Numbers of 8 bits become float16 in one instruction for two.
    COMPUTED: gl.constexpr = gl.float16 if IS_QUANTIZED else DTYPE
    # Two warpgroups have half the queries each for scores, and half the latents' numbers for weighted sums.
    GROUPS: gl.constexpr = gl.num_warps() // 4
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, ROWS // GROUPS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * GROUPS, 1], [16, ROWS, 16])
    SCORE_ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    SUM_ROW: gl.constexpr = gl.SliceLayout(0, SUMS)
    # A warp copies 4 rows of 128 bytes at a time.
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4 * GROUPS, 1], [1, 0])
    COPIED: gl.constexpr = gl.SliceLayout(1, COPY)
    LATENT_COPY: gl.constexpr = gl.BlockedLayout([1, 16 if IS_QUANTIZED else 8], [4, 8], [4 * GROUPS, 1], [1, 0])
    # A warp fetches the lines of 2 rows at a time.
    FETCH: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4 * GROUPS, 1], [1, 0])
    FETCHED: gl.constexpr = gl.SliceLayout(1, FETCH)
    latents = gl.allocate_shared_memory(
        COMPUTED,
        [1 if IS_QUANTIZED else STAGES, BLOCK, KV_RANK],
        gl.NVMMASharedLayout.get_default_for([BLOCK, KV_RANK], COMPUTED),
    )
    stored = latents
    if IS_QUANTIZED:
        stored = gl.allocate_shared_memory(
            STORED, [STAGES, BLOCK, KV_RANK], gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])
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
    # It may request its weights.
    release_kernel_behind()
    base = rows + layer_offset
    num_items = gl.load(items)
    for number in range(gl.program_id(0), num_items, gl.num_programs(0)):
        item = items + (1 + number) * ITEM
        first_row = gl.load(item)
        num_rows = gl.load(item + 1)
        to_position = gl.load(item + 2)
        item_pages = pages + gl.load(item + 3)
        start = gl.load(item + 4)
        end = gl.load(item + 5)
        part = gl.load(item + 6)
        page = pages_of(item_pages, start, end, PAGE_SIZE, BLOCK, COPIED)
        second_page = pages_of(item_pages, start + BLOCK, end, PAGE_SIZE, BLOCK, COPIED)
        next_page = second_page
        if STAGES == 3:
            next_page = pages_of(item_pages, start + 2 * BLOCK, end, PAGE_SIZE, BLOCK, COPIED)
        if number == gl.program_id(0):
            fetched_page = pages_of(item_pages, start, end, PAGE_SIZE, BLOCK, FETCHED)
            prefetch(base, fetched_page, start, page_stride, PAGE_SIZE, ROW, BLOCK, FETCH)
        # Plans are older than it, queries are its.
        wait_for_kernel_before()
        copy(stored, keys, 0, base, page, start, end, page_stride, PAGE_SIZE, ROW, LATENT_COPY, COPY)
        if STAGES == 3:
            copy(stored, keys, 1, base, second_page, start + BLOCK, end, page_stride, PAGE_SIZE, ROW, LATENT_COPY, COPY)
        i = gl.arange(0, ROWS, layout=COPIED)
        row = first_row + i
        token = (row // NUM_HEADS).to(gl.int64)
        head = (row % NUM_HEADS).to(gl.int64)
        exists = (i < num_rows)[:, None]
        r = gl.arange(0, KV_RANK, layout=gl.SliceLayout(0, COPY))[None, :]
        d = gl.arange(0, ROPE_DIM, layout=gl.SliceLayout(0, COPY))[None, :]
        q_place = q + (head * head_stride + token * KV_RANK)[:, None] + r
        rope_place = q_rope + (token * rope_token_stride + head * rope_head_stride)[:, None] + d
        query = gl.load(q_place, mask=exists, other=0.0)
        if IS_QUANTIZED:
            query = query.to(gl.float32) * (scale * kv_scale)
            query = gl.where(query > LARGEST, LARGEST, gl.where(query < -LARGEST, -LARGEST, query)).to(COMPUTED)
        queries.store(query)
        turned.store(gl.load(rope_place, mask=exists, other=0.0))
        fence_async_shared()
        # Visible to every query: blocks up to here need no mask.
        seen = gl.minimum(end, first_row // NUM_HEADS + to_position + 1)
        position = (first_row + gl.arange(0, ROWS, layout=SCORE_ROW)) // NUM_HEADS + to_position
        acc = gl.zeros([KV_RANK, ROWS], gl.float32, SUMS)
        top = gl.full([ROWS], float("-inf"), gl.float32, SCORE_ROW)
        # Of each token of a block, added up at the end.
        totals = gl.zeros([BLOCK, ROWS], gl.float32, SCORES)
        stage = 0
        for first in range(start, end, BLOCK):
            async_copy.wait_group(STAGES - 2)
            free = (stage + STAGES - 1) % STAGES
            ahead = first + (STAGES - 1) * BLOCK
            latent = latents.index(_zero() if IS_QUANTIZED else stage)
            if IS_QUANTIZED:
                copy(stored, keys, free, base, next_page, ahead, end, page_stride, PAGE_SIZE, ROW, LATENT_COPY, COPY)
                _expand(stored.index(stage), latent)
            fence_async_shared()
            scores = warpgroup_mma(
                latent,
                queries.permute((1, 0)),
                gl.zeros([BLOCK, ROWS], gl.float32, SCORES),
                use_acc=False,
                is_async=True,
            )
            if IS_QUANTIZED:
                # Apart: the rotated part has neither their scale nor their dtype.
                of_keys = warpgroup_mma(
                    keys.index(stage),
                    turned.permute((1, 0)),
                    gl.zeros([BLOCK, ROWS], gl.float32, SCORES),
                    use_acc=False,
                    is_async=True,
                )
            else:
                scores = warpgroup_mma(keys.index(stage), turned.permute((1, 0)), scores, is_async=True)
                copy(stored, keys, free, base, next_page, ahead, end, page_stride, PAGE_SIZE, ROW, LATENT_COPY, COPY)
            next_page = pages_of(item_pages, ahead + BLOCK, end, PAGE_SIZE, BLOCK, COPIED)
            stage = (stage + 1) % STAGES
            if IS_QUANTIZED:
                scores, of_keys = warpgroup_mma_wait(0, deps=[scores, of_keys])
                scores = scores + of_keys * scale
            else:
                scores = warpgroup_mma_wait(0, deps=[scores]) * scale
            if first + BLOCK > seen:
                key_position = first + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, SCORES))
                scores = gl.where(key_position[:, None] <= position[None, :], scores, float("-inf"))
            new_top = gl.maximum(top, gl.max(scores, axis=0))
            # Of a row that has seen no token yet.
            subtracted = gl.where(new_top == float("-inf"), 0.0, new_top)
            weights = gl.exp2(scores - subtracted[None, :])
            shrink = gl.exp2(top - subtracted)
            totals = totals * shrink[None, :] + weights
            weighed.store(weights.to(COMPUTED))
            fence_async_shared()
            acc = acc * gl.convert_layout(shrink, SUM_ROW)[None, :]
            acc = warpgroup_mma(latent.permute((1, 0)), weighed, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            top = new_top
        total = gl.sum(totals, axis=0)
        # A row of a later token alone may see nothing of the part.
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
