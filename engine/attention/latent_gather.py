"""Gathering of a sequence's quantized latents as one Triton kernel."""

import torch
import triton
import triton.language as tl

from tandem.engine.attention.latent_layout import LatentPages

GATHERED_TOKENS = 8


def gather_latents(pages: LatentPages, layer: int, slots: torch.Tensor, kv_scale: float) -> torch.Tensor:
    """Returns (num_tokens, kv_rank + rope_dim) of the compute dtype: latents times their scale, then keys.

    Args:
        slots: (num_tokens,) int64, page * page_size + offset in the page.
    """
    latents, keys = pages
    num_tokens, (page_size, kv_rank), rope_dim = len(slots), latents.shape[2:], keys.shape[3]
    out = torch.empty(num_tokens, kv_rank + rope_dim, dtype=keys.dtype, device=keys.device)
    _gather_latents[(triton.cdiv(num_tokens, GATHERED_TOKENS),)](
        latents,
        keys,
        slots,
        out,
        num_tokens,
        kv_scale,
        latents.stride(0),
        layer * latents.stride(1),
        keys.stride(0),
        layer * keys.stride(1),
        KV_RANK=kv_rank,
        ROPE_DIM=rope_dim,
        PAGE_SIZE=page_size,
        LATENT_ROW=latents.stride(2),
        KEY_ROW=keys.stride(2),
        TOKENS=GATHERED_TOKENS,
        num_warps=4,
    )
    return out


@triton.jit
def _gather_latents(  # type: ignore[no-untyped-def]
    latents,
    keys,
    slots,
    out,
    num_tokens,
    kv_scale,
    latent_page_stride,
    latent_offset,
    key_page_stride,
    key_offset,
    KV_RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LATENT_ROW: tl.constexpr,
    KEY_ROW: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    exists = token < num_tokens
    slot = tl.load(slots + token, mask=exists, other=0)
    page, row = slot // PAGE_SIZE, slot % PAGE_SIZE
    r = tl.arange(0, KV_RANK)[None, :]
    d = tl.arange(0, ROPE_DIM)[None, :]
    exists = exists[:, None]
    target = out + token[:, None] * (KV_RANK + ROPE_DIM)
    of_latents = latents + latent_offset + (page * latent_page_stride + row * LATENT_ROW)[:, None]
    latent = tl.load(of_latents + r, mask=exists).to(tl.float32) * kv_scale
    tl.store(target + r, latent.to(out.dtype.element_ty), mask=exists)
    of_keys = keys + key_offset + (page * key_page_stride + row * KEY_ROW)[:, None]
    tl.store(target + KV_RANK + d, tl.load(of_keys + d, mask=exists), mask=exists)
