"""Attention of tiles of queries over latents, in Gluon: needs the tensor cores of compute capability 9.

Shared memory has room for two blocks of latents. While tensor cores multiply one, the next is copied. Triton's own
pipeline does that from three blocks on.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from tandem.engine.attention.latent_plan import BLOCK, ITEM_SIZE

# Starts while the kernel before still runs, and waits for its end (programmatic dependent launch).
DEPENDENT = True
# Lines of 128 bytes that a token's latent may have.
MAX_LINES = gl.constexpr(16)
# Rows whose sums fit in the registers of one warpgroup.
MAX_ROWS_OF_GROUP = 32


def attend_tiles(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    items: torch.Tensor,
    pages: torch.Tensor,
    parts: torch.Tensor,
    log_sums: torch.Tensor,
    scale: float,
    num_programs: int,
    out: torch.Tensor,
) -> None:
    """As latent_kernels.attend, without merging parts. Args: scale: of scores in base 2."""
    num_heads, _, kv_rank = q.shape
    page_size, token_dim = pool.shape[2:]
    _attend_tiles[(num_programs,)](
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
        scale,
        q.stride(0),
        q_rope.stride(0),
        q_rope.stride(1),
        NUM_HEADS=num_heads,
        KV_RANK=kv_rank,
        ROPE_DIM=token_dim - kv_rank,
        PAGE_SIZE=page_size,
        ROWS=parts.shape[1],
        BLOCK=BLOCK,
        ITEM=ITEM_SIZE,
        launch_pdl=DEPENDENT,
        num_warps=4 if parts.shape[1] <= MAX_ROWS_OF_GROUP else 8,
    )


@gluon.jit
def _pages_of(pages, first, end, PAGE_SIZE: gl.constexpr, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the page id of each token of a block, 0 behind the end."""
    token = first + gl.arange(0, BLOCK, layout=LAYOUT)
    return gl.load(pages + token // PAGE_SIZE, mask=token < end, other=0)


@gluon.jit
def _copy(  # type: ignore[no-untyped-def]
    latent_smem,
    key_smem,
    base,
    page,
    first,
    end,
    page_stride,
    PAGE_SIZE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Starts copying a block. Tokens behind the end become zeros: unused slots may hold NaN."""
    BLOCK: gl.constexpr = latent_smem.shape[0]
    KV_RANK: gl.constexpr = latent_smem.shape[1]
    ROPE_DIM: gl.constexpr = key_smem.shape[1]
    token = first + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LAYOUT))
    exists = (token < end)[:, None]
    offset = page.to(gl.int64) * page_stride + token % PAGE_SIZE * (KV_RANK + ROPE_DIM)
    source = base + offset[:, None]
    r = gl.arange(0, KV_RANK, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    d = gl.arange(0, ROPE_DIM, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    async_copy.async_copy_global_to_shared(latent_smem, source + r, mask=exists)
    async_copy.async_copy_global_to_shared(key_smem, source + (KV_RANK + d), mask=exists)
    async_copy.commit_group()


@gluon.jit
def _prefetch(  # type: ignore[no-untyped-def]
    base,
    page,
    first,
    page_stride,
    PAGE_SIZE: gl.constexpr,
    TOKEN_DIM: gl.constexpr,
    BLOCK: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Fetches a block into the L2 cache, which later writes to it change too."""
    LINE: gl.constexpr = 128 // (base.dtype.element_ty.primitive_bitwidth // 8)
    token = first + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LAYOUT))
    offset = page.to(gl.int64) * page_stride + token % PAGE_SIZE * TOKEN_DIM
    # The last line again, if lines are no power of two.
    line = gl.minimum(gl.arange(0, MAX_LINES, layout=gl.SliceLayout(0, LAYOUT)), (TOKEN_DIM - 1) // LINE)
    address = (base + offset[:, None] + (line * LINE)[None, :]).to(gl.int64)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _wait_for_kernel_before():  # type: ignore[no-untyped-def]
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _release_kernel_behind():  # type: ignore[no-untyped-def]
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _attend_tiles(  # type: ignore[no-untyped-def]
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
    NUM_HEADS: gl.constexpr,
    KV_RANK: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK: gl.constexpr,
    ITEM: gl.constexpr,
):
    """Computes every num_programs-th item. Tokens are rows of the products, and queries columns."""
    DTYPE: gl.constexpr = pool.dtype.element_ty
    # Two warpgroups have half the queries each for scores, and half the latents' numbers for weighted sums.
    GROUPS: gl.constexpr = gl.num_warps() // 4
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, ROWS // GROUPS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * GROUPS, 1], [16, ROWS, 16])
    SCORE_ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    SUM_ROW: gl.constexpr = gl.SliceLayout(0, SUMS)
    # A warp copies 4 rows of 128 bytes at a time.
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4 * GROUPS, 1], [1, 0])
    COPIED: gl.constexpr = gl.SliceLayout(1, COPY)
    # A warp fetches the lines of 2 rows at a time.
    FETCH: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4 * GROUPS, 1], [1, 0])
    FETCHED: gl.constexpr = gl.SliceLayout(1, FETCH)
    latents = gl.allocate_shared_memory(
        DTYPE, [2, BLOCK, KV_RANK], gl.NVMMASharedLayout.get_default_for([BLOCK, KV_RANK], DTYPE)
    )
    keys = gl.allocate_shared_memory(
        DTYPE, [2, BLOCK, ROPE_DIM], gl.NVMMASharedLayout.get_default_for([BLOCK, ROPE_DIM], DTYPE)
    )
    queries = gl.allocate_shared_memory(
        DTYPE, [ROWS, KV_RANK], gl.NVMMASharedLayout.get_default_for([ROWS, KV_RANK], DTYPE)
    )
    turned = gl.allocate_shared_memory(
        DTYPE, [ROWS, ROPE_DIM], gl.NVMMASharedLayout.get_default_for([ROWS, ROPE_DIM], DTYPE)
    )
    weighed = gl.allocate_shared_memory(
        DTYPE, [BLOCK, ROWS], gl.NVMMASharedLayout.get_default_for([BLOCK, ROWS], DTYPE)
    )
    # It may request its weights.
    _release_kernel_behind()
    base = pool + layer_offset
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
        page = _pages_of(item_pages, start, end, PAGE_SIZE, BLOCK, COPIED)
        next_page = _pages_of(item_pages, start + BLOCK, end, PAGE_SIZE, BLOCK, COPIED)
        if number == gl.program_id(0):
            fetched_page = _pages_of(item_pages, start, end, PAGE_SIZE, BLOCK, FETCHED)
            _prefetch(base, fetched_page, start, page_stride, PAGE_SIZE, KV_RANK + ROPE_DIM, BLOCK, FETCH)
        # Plans are older than it, queries are its.
        _wait_for_kernel_before()
        _copy(latents.index(0), keys.index(0), base, page, start, end, page_stride, PAGE_SIZE, COPY)
        i = gl.arange(0, ROWS, layout=COPIED)
        row = first_row + i
        token = (row // NUM_HEADS).to(gl.int64)
        head = (row % NUM_HEADS).to(gl.int64)
        exists = (i < num_rows)[:, None]
        r = gl.arange(0, KV_RANK, layout=gl.SliceLayout(0, COPY))[None, :]
        d = gl.arange(0, ROPE_DIM, layout=gl.SliceLayout(0, COPY))[None, :]
        q_place = q + (head * head_stride + token * KV_RANK)[:, None] + r
        rope_place = q_rope + (token * rope_token_stride + head * rope_head_stride)[:, None] + d
        queries.store(gl.load(q_place, mask=exists, other=0.0))
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
            async_copy.wait_group(0)
            fence_async_shared()
            latent = latents.index(stage)
            scores = warpgroup_mma(
                latent,
                queries.permute((1, 0)),
                gl.zeros([BLOCK, ROWS], gl.float32, SCORES),
                use_acc=False,
                is_async=True,
            )
            scores = warpgroup_mma(keys.index(stage), turned.permute((1, 0)), scores, is_async=True)
            stage = 1 - stage
            if first + BLOCK < end:
                _copy(
                    latents.index(stage),
                    keys.index(stage),
                    base,
                    next_page,
                    first + BLOCK,
                    end,
                    page_stride,
                    PAGE_SIZE,
                    COPY,
                )
            next_page = _pages_of(item_pages, first + 2 * BLOCK, end, PAGE_SIZE, BLOCK, COPIED)
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
            weighed.store(weights.to(DTYPE))
            fence_async_shared()
            acc = acc * gl.convert_layout(shrink, SUM_ROW)[None, :]
            acc = warpgroup_mma(latent.permute((1, 0)), weighed, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            top = new_top
        total = gl.sum(totals, axis=0)
        # A row of a later token alone may see nothing of the part.
        divisor = gl.where(total > 0.0, total, 1.0)
        acc = acc * gl.convert_layout(1.0 / divisor, SUM_ROW)[None, :]
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
