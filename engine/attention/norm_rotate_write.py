"""Fused norms, rotation and write into pages, before attention. Needs CUDA."""

import torch
import triton
import triton.language as tl

from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.scales import KvScales
from tandem.engine.layers.norm import QkNorm
from tandem.engine.layers.rotary import Rotation

# Heads per program: few if programs are few, otherwise enough for 16 bytes per thread.
HEADS_OF_FEW_TOKENS = 4
HEADS = 16
FEW_TOKENS = 256
# Ada converts to 8 bits in hardware.
QUANTIZING_CAPABILITY = 8, 9


def why_not_written(layout: KvHeadLayout, device: torch.device) -> str:
    if layout.quantized_to and torch.cuda.get_device_capability(device) < QUANTIZING_CAPABILITY:
        major, minor = QUANTIZING_CAPABILITY
        return f"pages of {layout.quantized_to} need a GPU of compute capability {major}.{minor} or later"
    return ""


def norm_rotate_write(
    qkv: torch.Tensor,
    num_q_heads: int,
    rotation: Rotation,
    qk_norm: QkNorm | None,
    pool: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    *,
    kv_scales: KvScales | None = None,
    keep_kv: bool = False,
) -> torch.Tensor:
    """Normalizes (if qk_norm) and rotates queries and keys, and writes keys and values into their pages.

    Computes in float32 and rounds once.

    Args:
        qkv: (num_tokens, num_q_heads + 2 * num_kv_heads, head_dim), contiguous; head_dim a power of 2.
        pool: as KvHeadLayout.view.
        slots: (num_tokens,) int64, page * page_size + offset in the page.
        kv_scales: None: pages are not quantized.
        keep_kv: also write the pages' keys and values over those in qkv.

    Returns:
        queries: (num_tokens, num_q_heads, head_dim).
    """
    num_tokens, num_heads, head_dim = qkv.shape
    _, _, _, page_size, num_kv_heads, _ = pool.shape
    assert qkv.is_contiguous() and num_heads == num_q_heads + 2 * num_kv_heads
    q = torch.empty(num_tokens, num_q_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    weight, eps = qk_norm if qk_norm is not None else (qkv, 0.0)
    half_page = page_size * num_kv_heads * head_dim
    heads = HEADS_OF_FEW_TOKENS if num_tokens <= FEW_TOKENS else HEADS
    k_scale, v_scale = (kv_scales.keys[layer], kv_scales.values[layer]) if kv_scales else (1.0, 1.0)
    _norm_rotate_write[(num_tokens, triton.cdiv(num_heads, heads))](
        qkv,
        q,
        pool,
        slots,
        rotation.positions,
        rotation.tables.cos,
        rotation.tables.sin,
        weight,
        eps,
        k_scale,
        v_scale,
        1.0 / k_scale,
        1.0 / v_scale,
        pool.stride(0),
        layer * 2 * half_page,
        PAGE_SIZE=page_size,
        NUM_Q=num_q_heads,
        NUM_KV=num_kv_heads,
        HALF=head_dim // 2,
        HAS_NORM=qk_norm is not None,
        KEEP_KV=keep_kv,
        IS_QUANTIZED=kv_scales is not None,
        LARGEST=torch.finfo(pool.dtype).max,
        HEADS=heads,
        num_warps=4,
    )
    return q


@triton.jit
def _norm_rotate_write(  # type: ignore[no-untyped-def]
    qkv,
    q_out,
    pool,
    slots,
    positions,
    cos,
    sin,
    weight,
    eps,
    k_scale,
    v_scale,
    inverse_k_scale,
    inverse_v_scale,
    page_stride,
    layer_offset,
    PAGE_SIZE: tl.constexpr,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    KEEP_KV: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    LARGEST: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)  # (HEADS,)
    i = tl.arange(0, HALF)  # (HALF,)
    exists = (head < NUM_Q + 2 * NUM_KV)[:, None]
    is_turned = (head < NUM_Q + NUM_KV)[:, None]
    source = (token * (NUM_Q + 2 * NUM_KV) + head[:, None]) * (2 * HALF) + i[None, :]
    a = tl.load(qkv + source, mask=exists, other=0.0).to(tl.float32)
    b = tl.load(qkv + source + HALF, mask=exists, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean = (tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        row = tl.where(head < NUM_Q, 0, 1)[:, None] * (2 * HALF) + i[None, :]
        weight_a = tl.load(weight + row).to(tl.float32)
        weight_b = tl.load(weight + row + HALF).to(tl.float32)
        a = tl.where(is_turned, a * scale * weight_a, a)
        b = tl.where(is_turned, b * scale * weight_b, b)
    position = tl.load(positions + token)
    c = tl.load(cos + position * HALF + i)[None, :]
    s = tl.load(sin + position * HALF + i)[None, :]
    turned_a = a * c - b * s
    turned_b = b * c + a * s
    a = tl.where(is_turned, turned_a, a)
    b = tl.where(is_turned, turned_b, b)
    is_query = (head < NUM_Q)[:, None]
    target = (token * NUM_Q + head[:, None]) * (2 * HALF) + i[None, :]
    tl.store(q_out + target, a.to(q_out.dtype.element_ty), mask=is_query)
    tl.store(q_out + target + HALF, b.to(q_out.dtype.element_ty), mask=is_query)
    slot = tl.load(slots + token)
    is_value = tl.where(head >= NUM_Q + NUM_KV, 1, 0)
    is_written = exists & (head >= NUM_Q)[:, None]
    if IS_QUANTIZED:
        inverse = tl.where(is_value == 1, inverse_v_scale, inverse_k_scale)[:, None]
        a = _rounded(a * inverse, LARGEST)
        b = _rounded(b * inverse, LARGEST)
        if KEEP_KV:
            scale = tl.where(is_value == 1, v_scale, k_scale)[:, None]
            tl.store(qkv + source, (a * scale).to(qkv.dtype.element_ty), mask=is_written)
            tl.store(qkv + source + HALF, (b * scale).to(qkv.dtype.element_ty), mask=is_written)
        a = a.to(pool.dtype.element_ty)
        b = b.to(pool.dtype.element_ty)
    else:
        a = a.to(pool.dtype.element_ty)
        b = b.to(pool.dtype.element_ty)
        if KEEP_KV:
            # Values are already in place.
            is_key = is_turned & (head >= NUM_Q)[:, None]
            tl.store(qkv + source, a, mask=is_key)
            tl.store(qkv + source + HALF, b, mask=is_key)
    kv_head = head - NUM_Q - is_value * NUM_KV
    row_in_pages = (is_value * PAGE_SIZE + slot % PAGE_SIZE) * NUM_KV + kv_head  # (HEADS,) int64
    place = slot // PAGE_SIZE * page_stride + layer_offset + row_in_pages[:, None] * (2 * HALF) + i[None, :]
    tl.store(pool + place, a, mask=is_written)
    tl.store(pool + place + HALF, b, mask=is_written)


@triton.jit
def _rounded(x, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rounds float32 to e4m3 precision: 4 significant bits, in steps of at least 2^-9, ties to even.

    Saturates and keeps NaN. Replaces a conversion to e4m3 and back, which Triton 3.6 computes wrongly in tiles of 16
    heads.
    """
    x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
    bits = x.to(tl.int32, bitcast=True)
    # Add half a step, less one if the last kept bit is even; clear the rest.
    rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    # Below 2^-6, adding 1.5 * 2^14 leaves steps of 2^-9 but loses zero's sign.
    sign = bits & -0x80000000
    small = (((x + 24576.0) - 24576.0).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < 0.015625, small, tl.where(x == x, rounded, x))
