"""Copies of latents from pages, and dependent launch, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# Lines of 128 bytes that a token's row in a layer may have.
MAX_LINES = gl.constexpr(16)


@gluon.jit
def pages_of(pages, first, end, PAGE_SIZE: gl.constexpr, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the page id of each token of a block, 0 behind the end."""
    token = first + gl.arange(0, BLOCK, layout=LAYOUT)
    return gl.load(pages + token // PAGE_SIZE, mask=token < end, other=0)


@gluon.jit
def copy(  # type: ignore[no-untyped-def]
    latents,
    keys,
    stage,
    base,
    page,
    first,
    end,
    page_stride,
    PAGE_SIZE: gl.constexpr,
    ROW: gl.constexpr,
    LAYOUT: gl.constexpr,
    KEY_LAYOUT: gl.constexpr,
):
    """Starts copying a block into a stage, as one group of copies, which is empty behind the end. Tokens behind the
    end become zeros: unused slots may hold NaN."""
    if first < end:
        TOKENS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
        KEY_TOKENS: gl.constexpr = gl.SliceLayout(1, KEY_LAYOUT)
        KV_RANK: gl.constexpr = latents.shape[2]
        token = first + gl.arange(0, latents.shape[1], layout=TOKENS)
        row = base + (gl.convert_layout(page, TOKENS).to(gl.int64) * page_stride + token % PAGE_SIZE * ROW)
        exists = token < end
        r = gl.arange(0, KV_RANK, layout=gl.SliceLayout(0, LAYOUT))
        async_copy.async_copy_global_to_shared(latents.index(stage), row[:, None] + r[None, :], mask=exists[:, None])
        key = gl.convert_layout(row + KV_RANK, KEY_TOKENS).to(gl.pointer_type(keys.dtype), bitcast=True)
        key_exists = gl.convert_layout(exists, KEY_TOKENS)
        d = gl.arange(0, keys.shape[2], layout=gl.SliceLayout(0, KEY_LAYOUT))
        async_copy.async_copy_global_to_shared(keys.index(stage), key[:, None] + d[None, :], mask=key_exists[:, None])
    async_copy.commit_group()


@gluon.jit
def prefetch(  # type: ignore[no-untyped-def]
    base,
    page,
    first,
    page_stride,
    PAGE_SIZE: gl.constexpr,
    ROW: gl.constexpr,
    BLOCK: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Fetches a block into the L2 cache, which later writes to it change too."""
    LINE: gl.constexpr = 128 // (base.dtype.element_ty.primitive_bitwidth // 8)
    token = first + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LAYOUT))
    offset = page.to(gl.int64) * page_stride + token % PAGE_SIZE * ROW
    # The last line again, if lines are no power of two.
    line = gl.minimum(gl.arange(0, MAX_LINES, layout=gl.SliceLayout(0, LAYOUT)), (ROW - 1) // LINE)
    address = (base + offset[:, None] + (line * LINE)[None, :]).to(gl.int64)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_kernel_before():  # type: ignore[no-untyped-def]
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def release_kernel_behind():  # type: ignore[no-untyped-def]
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
