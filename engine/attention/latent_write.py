"""Rotation of queries, and writing of latents into pages, as one Triton kernel."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tandem.engine.attention.latent_layout import LatentPages
from tandem.engine.attention.latent_tiles import DEPENDENT
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.rotary import Rotation

WRITTEN_HEADS = 16


def rotate_write(
    q: torch.Tensor,
    kv: torch.Tensor,
    norm: Norm,
    rotation: Rotation,
    pages: LatentPages,
    layer: int,
    slots: torch.Tensor,
    kv_scale: float = 1.0,
) -> None:
    """Rotates the last rope_dim numbers of queries in place, and writes normalized latents and rotated keys into pages.

    Computes in float32 and rounds once.

    Args:
        q: (num_tokens, num_heads, nope_dim + rope_dim), contiguous.
        kv: (num_tokens, kv_rank + rope_dim), contiguous.
        pages: of the pool; latents may be quantized.
        slots: (num_tokens,) int64, page * page_size + offset in the page.
        kv_scale: of quantized latents.
    """
    num_tokens, num_heads, q_dim = q.shape
    latents, keys = pages
    page_size, kv_rank = latents.shape[2:]
    assert q.is_contiguous() and kv.is_contiguous()
    _rotate_write[(num_tokens, 1 + triton.cdiv(num_heads, WRITTEN_HEADS))](
        q,
        kv,
        latents,
        keys,
        slots,
        rotation.positions,
        rotation.tables.cos,
        rotation.tables.sin,
        norm.weight,
        norm.eps,
        1.0 / kv_scale,
        latents.stride(0),
        layer * latents.stride(1),
        keys.stride(0),
        layer * keys.stride(1),
        NUM_HEADS=num_heads,
        Q_DIM=q_dim,
        KV_RANK=kv_rank,
        PAIRS=keys.shape[3] // 2,
        PAGE_SIZE=page_size,
        LATENT_STRIDE=latents.stride(2),
        KEY_STRIDE=keys.stride(2),
        LARGEST=torch.finfo(latents.dtype).max if latents.dtype.itemsize == 1 else None,
        HEADS=WRITTEN_HEADS,
        launch_pdl=DEPENDENT,
        num_warps=4,
    )


@triton.jit
def _rotate_write(  # type: ignore[no-untyped-def]
    q,
    kv,
    latents,
    keys,
    slots,
    positions,
    cos,
    sin,
    weight,
    eps,
    inverse_scale,
    latent_page_stride,
    latent_offset,
    key_page_stride,
    key_offset,
    NUM_HEADS: tl.constexpr,
    Q_DIM: tl.constexpr,
    KV_RANK: tl.constexpr,
    PAIRS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LATENT_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    LARGEST: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Program (token, 0) writes into the page; the others rotate HEADS queries each. LARGEST: None: latents are not
    quantized."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAIRS)
    position = tl.load(positions + token)
    c = tl.load(cos + position * PAIRS + i)
    s = tl.load(sin + position * PAIRS + i)
    gdc_wait()
    if tl.program_id(1) == 0:
        slot = tl.load(slots + token)
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        source = kv + token * (KV_RANK + 2 * PAIRS)
        r = tl.arange(0, KV_RANK)
        latent = tl.load(source + r).to(tl.float32)
        factor = tl.rsqrt(tl.sum(latent * latent, 0) / KV_RANK + eps)
        latent = latent * factor * tl.load(weight + r).to(tl.float32)
        if LARGEST is not None:
            latent = latent * inverse_scale
            # Not by minimum and maximum, which lose NaN.
            latent = tl.where(latent > LARGEST, LARGEST, tl.where(latent < -LARGEST, -LARGEST, latent))
        target = latents + page * latent_page_stride + latent_offset + offset * LATENT_STRIDE
        tl.store(target + r, latent.to(latents.dtype.element_ty))
        a = tl.load(source + KV_RANK + 2 * i).to(tl.float32)
        b = tl.load(source + KV_RANK + 2 * i + 1).to(tl.float32)
        key = keys + page * key_page_stride + key_offset + offset * KEY_STRIDE
        tl.store(key + 2 * i, (a * c - b * s).to(keys.dtype.element_ty))
        tl.store(key + 2 * i + 1, (b * c + a * s).to(keys.dtype.element_ty))
    else:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        exists = (head < NUM_HEADS)[:, None]
        place = q + (token * NUM_HEADS + head[:, None]) * Q_DIM + (Q_DIM - 2 * PAIRS) + 2 * i[None, :]
        # Other names than above: Triton gives a variable one shape in both branches.
        q_a = tl.load(place, mask=exists, other=0.0).to(tl.float32)
        q_b = tl.load(place + 1, mask=exists, other=0.0).to(tl.float32)
        turned_a = q_a * c[None, :] - q_b * s[None, :]
        turned_b = q_b * c[None, :] + q_a * s[None, :]
        tl.store(place, turned_a.to(q.dtype.element_ty), mask=exists)
        tl.store(place + 1, turned_b.to(q.dtype.element_ty), mask=exists)
