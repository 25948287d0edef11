"""Attention over latents in plain torch: CPU backend and reference of kernels."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from tandem.engine.attention.base import LatentBackend, LatentHeads
from tandem.engine.attention.latent_layout import LatentLayout
from tandem.engine.attention.latent_rows import LatentRows
from tandem.engine.attention.paged_rows import BatchRows, PagedRows
from tandem.engine.attention.scales import KvScales
from tandem.engine.batch import Batch
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.layers.norm import Norm, rms_norm
from tandem.engine.layers.rotary import Rotation, rotate_pairs


class _Prefill(NamedTuple):
    """
    Attributes:
        start, end: the prompt's range of the token dimension.
        rows: (device_len,) int64, layer 0's.
        mask: (extend_len, device_len), added to scores; None without a cached prefix.
    """

    start: int
    end: int
    rows: torch.Tensor
    mask: torch.Tensor | None


class LatentReferenceAttention(LatentBackend):
    """Gathers latents from their pages, then calls torch's scaled_dot_product_attention.

    Decode multiplies queries and outputs instead of every latent (the absorption of DeepSeek-V2,
    https://arxiv.org/abs/2405.04434, section 2.1.2). A prefill makes keys and values of the latents, which takes fewer
    operations for many queries.

    New latents are read from their pages too, so the cached prefix does not change the output.
    """

    reads_quantized = True
    computes_mixed = True
    computes_drafts = True

    def __init__(self, pool: KvPool, num_q_heads: int, kv_scales: KvScales | None = None) -> None:
        layout = pool.layout
        assert isinstance(layout, LatentLayout)
        self._layout = layout
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        self._pool_rows = LatentRows(layout, pool.memory, kv_scales)
        self._rows = PagedRows(layout, self._pool_rows.per_page, self._dtype, pool.device)
        # (num_tokens,) int64: layer 0's rows of new tokens.
        self._write_rows = torch.empty(0)
        self._decode: BatchRows | None = None
        self._prefills: list[_Prefill] = []

    @torch.inference_mode()
    def plan(self, batch: Batch) -> None:
        self._decode = None
        self._prefills = []
        written = []
        if batch.decoded:
            self._decode = self._rows.of_batch(batch.decoded)
            written.append(self._decode.written)
        start = batch.num_decoded_tokens
        for s in batch.prompts:
            rows = self._rows.of_sequence(s)
            written.append(rows[s.cached_len :])
            end = start + s.extend_len
            self._prefills.append(_Prefill(start, end, rows, self._rows.causal_mask(s)))
            start = end
        self._write_rows = torch.cat(written)

    @torch.inference_mode()
    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, norm: Norm, rotation: Rotation, heads: LatentHeads, layer: int
    ) -> torch.Tensor:
        assert q.dtype == self._dtype, f"q is {q.dtype}, pages are {self._dtype}"
        layout = self._layout
        latents, k_rope = kv.split((layout.kv_rank, layout.rope_dim), dim=-1)
        q_nope, q_rope = q.split((q.shape[-1] - layout.rope_dim, layout.rope_dim), dim=-1)
        q_rope = rotate_pairs(q_rope, *rotation.cos_sin)
        k_rope = rotate_pairs(k_rope[:, None], *rotation.cos_sin)[:, 0]
        if layout.quantized_to:
            # Rounded once, as by kernels.
            latents, norm = latents.float(), Norm(norm.weight.float(), norm.eps)
        self._pool_rows.write(self._write_rows, layer, rms_norm(latents, *norm), k_rope)
        parts = []
        if self._decode is not None:
            num_decoded = len(self._decode.written)
            parts.append(self._run_decode(self._decode, q_nope[:num_decoded], q_rope[:num_decoded], heads, layer))
        for prefill in self._prefills:
            tokens = slice(prefill.start, prefill.end)
            parts.append(self._run_prefill(prefill, torch.cat((q_nope[tokens], q_rope[tokens]), -1), heads, layer))
        return torch.cat(parts)

    def _run_decode(
        self, plan: BatchRows, q_nope: torch.Tensor, q_rope: torch.Tensor, heads: LatentHeads, layer: int
    ) -> torch.Tensor:
        absorbed = torch.matmul(q_nope.transpose(0, 1), heads.keys).transpose(0, 1)  # (num_tokens, num_heads, kv_rank)
        gathered = self._pool_rows.read(plan.rows.flatten(), layer).unflatten(0, plan.rows.shape)[:, None]
        # Heads take the place of queries: all read the same latents. Values are the latents, and the rotated part is
        # computed in vain, because torch wants keys and values of one size.
        queries = plan.pad(torch.cat((absorbed, q_rope), dim=-1))
        mask = plan.mask if plan.queries is None else plan.mask.repeat_interleave(queries.shape[2], dim=1)
        out = F.scaled_dot_product_attention(
            queries.flatten(1, 2)[:, None],  # (batch, 1, num_queries * num_heads, kv_rank + rope_dim)
            gathered,
            gathered,
            attn_mask=mask[:, None],
            scale=heads.scale,
        )
        # (num_heads, num_tokens, kv_rank).
        latents = plan.unpad(out[:, 0].unflatten(1, queries.shape[1:3]))[..., : self._layout.kv_rank].transpose(0, 1)
        return torch.matmul(latents, heads.values.transpose(1, 2)).transpose(0, 1).flatten(1)

    def _run_prefill(self, plan: _Prefill, q: torch.Tensor, heads: LatentHeads, layer: int) -> torch.Tensor:
        gathered = self._pool_rows.read(plan.rows, layer)
        latents, k_rope = gathered.split((self._layout.kv_rank, self._layout.rope_dim), dim=-1)
        num_heads, value_dim, _ = heads.values.shape
        k_nope = torch.matmul(latents, heads.keys.transpose(1, 2))  # (num_heads, device_len, nope_dim)
        keys = torch.cat((k_nope, k_rope.expand(num_heads, -1, -1)), dim=-1)
        values = torch.matmul(latents, heads.values.transpose(1, 2))  # (num_heads, device_len, value_dim)
        if value_dim < keys.shape[-1]:
            # With other sizes than the keys', torch holds the scores of all pairs.
            values = F.pad(values, (0, keys.shape[-1] - value_dim))
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),  # (1, num_heads, extend_len, nope_dim + rope_dim)
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=plan.mask,
            is_causal=plan.mask is None,
            scale=heads.scale,
        )
        return out.squeeze(0)[..., :value_dim].transpose(0, 1).flatten(1)
