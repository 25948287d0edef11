"""Attention in plain torch: CPU backend and float32 reference."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from tandem.engine.attention.base import HeadBackend
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.paged_rows import BatchRows, PagedRows, token_rows
from tandem.engine.attention.quantization import Quantizer
from tandem.engine.attention.scales import KvScales
from tandem.engine.batch import Batch
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.layers.norm import QkNorm, rms_norm
from tandem.engine.layers.rotary import Rotation, rotate


class _Decode(NamedTuple):
    """A decode step, padded to the longest sequence.

    Attributes:
        rows: (2 * batch * kv_len,) int64, layer 0's rows of keys, then of values; padding repeats token 0.
        mask: (batch, 1, 1 or num_queries * group, kv_len), added to scores: -inf for padding and for later tokens.
        gathered: (2 * batch * kv_len, num_kv_heads * head_dim), shared by layers.
        num_tokens: new tokens of all sequences.
        of_batch: their places.
    """

    rows: torch.Tensor
    mask: torch.Tensor
    gathered: torch.Tensor
    num_tokens: int
    of_batch: BatchRows


class _Prefill(NamedTuple):
    """
    Attributes:
        start, end: the prompt's range of the token dimension.
        rows: (2 * device_len,) int64, layer 0's rows of keys, then of values.
        mask: (extend_len, device_len), added to scores; None without a cached prefix.
    """

    start: int
    end: int
    rows: torch.Tensor
    mask: torch.Tensor | None


class ReferenceAttention(HeadBackend):
    """Gathers tokens from their pages, then calls torch's scaled_dot_product_attention.

    The pool is viewed as rows of num_kv_heads * head_dim numbers: one token's keys or values in one layer, at::

        page * rows_per_page + (layer * 2 + (0: keys, 1: values)) * page_size + offset in page

    New keys and values are read from their pages too, so the cached prefix does not change the output.
    """

    reads_quantized = True
    computes_mixed = True
    computes_drafts = True

    def __init__(self, pool: KvPool, num_q_heads: int, kv_scales: KvScales | None = None) -> None:
        layout = pool.layout
        assert isinstance(layout, KvHeadLayout)
        assert num_q_heads % layout.num_kv_heads == 0
        self._layout = layout
        self._num_q_heads = num_q_heads
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        # (keys, values) per layer; empty if pages are not quantized.
        self._quantizers: list[tuple[Quantizer, Quantizer]] = []
        pages = layout.view(pool.memory)
        if layout.quantized_to:
            scales = kv_scales or KvScales.ones(layout.num_layers)
            for pair in zip(scales.keys, scales.values, strict=True):
                keys, values = (Quantizer(layout, scale, pool.device) for scale in pair)
                self._quantizers.append((keys, values))
            pages = pages.view(torch.uint8)
        self._pool_rows, rows_per_page = token_rows(pages, layout.num_kv_heads * layout.head_dim)
        self._rows = PagedRows(layout, rows_per_page, self._dtype, pool.device)
        # (2 * num_tokens,) int64: layer 0's rows of new keys, then values.
        self._write_rows = torch.empty(0)
        self._decode: _Decode | None = None
        self._prefills: list[_Prefill] = []

    @torch.inference_mode()
    def plan(self, batch: Batch) -> None:
        self._decode = None
        self._prefills = []
        written = []
        if batch.decoded:
            of_batch = self._rows.of_batch(batch.decoded)
            written.append(of_batch.written)
            self._decode = self._plan_decode(of_batch)
        start = batch.num_decoded_tokens
        for s in batch.prompts:
            rows = self._rows.of_sequence(s)
            written.append(rows[s.cached_len :])
            end = start + s.extend_len
            self._prefills.append(_Prefill(start, end, self._with_values(rows), self._rows.causal_mask(s)))
            start = end
        self._write_rows = self._with_values(torch.cat(written))

    @torch.inference_mode()
    def attend(self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, layer: int) -> torch.Tensor:
        num_q_heads, num_kv_heads = self._num_q_heads, self._layout.num_kv_heads
        # (num_tokens, num_q_heads + num_kv_heads, head_dim).
        qk, v = qkv.split([num_q_heads + num_kv_heads, num_kv_heads], dim=1)
        if qk_norm is not None:
            q_weight, k_weight = qk_norm.weight
            weights = [q_weight.expand(num_q_heads, -1), k_weight.expand(num_kv_heads, -1)]
            qk = rms_norm(qk, torch.cat(weights), qk_norm.eps)
        q, k = rotate(qk, *rotation.cos_sin).split([num_q_heads, num_kv_heads], dim=1)
        return self._run(q, k, v, layer)

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        assert q.dtype == self._dtype, f"q is {q.dtype}, keys are {self._dtype}"
        if self._quantizers:
            of_keys, of_values = self._quantizers[layer]
            k, v = of_keys.quantized(k), of_values.quantized(v)
        self._pool_rows.index_copy_(0, self._write_rows + self._offset(layer), torch.cat((k, v)).flatten(1))
        if self._decode is None:
            return torch.cat([self._run_prefill(prefill, q, layer) for prefill in self._prefills])
        decoded = self._run_decode(self._decode, q[: self._decode.num_tokens], layer)
        if not self._prefills:
            return decoded
        return torch.cat([decoded, *(self._run_prefill(prefill, q, layer) for prefill in self._prefills)])

    def _plan_decode(self, planned: BatchRows) -> _Decode:
        gathered = self._pool_rows.new_empty(2 * planned.rows.numel(), self._pool_rows.shape[1])
        mask = planned.mask
        if planned.queries is not None:
            mask = mask.repeat_interleave(self._num_q_heads // self._layout.num_kv_heads, dim=1)
        rows = self._with_values(planned.rows.flatten())
        return _Decode(rows, mask[:, None], gathered, len(planned.written), planned)

    def _run_decode(self, plan: _Decode, q: torch.Tensor, layer: int) -> torch.Tensor:
        torch.index_select(self._pool_rows, 0, plan.rows + self._offset(layer), out=plan.gathered)
        keys, values = self._split_heads(self._numbers(plan.gathered, layer), len(plan.mask))
        # Query heads of a group take the place of queries, so torch reads each key and value once per group: on a CPU a
        # quarter faster than enable_gqa.
        grouped = q.unflatten(1, (self._layout.num_kv_heads, -1))  # (num_tokens, num_kv_heads, group, head_dim)
        if plan.of_batch.queries is None:
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=plan.mask).flatten(1)
        padded = plan.of_batch.pad(grouped).transpose(1, 2)  # (batch, num_kv_heads, num_queries, group, head_dim)
        out = F.scaled_dot_product_attention(padded.flatten(2, 3), keys, values, attn_mask=plan.mask)
        return plan.of_batch.unpad(out.unflatten(2, padded.shape[2:4]).transpose(1, 2)).flatten(1)

    def _run_prefill(self, plan: _Prefill, q: torch.Tensor, layer: int) -> torch.Tensor:
        gathered = self._pool_rows.index_select(0, plan.rows + self._offset(layer))
        keys, values = self._split_heads(self._numbers(gathered, layer), 1)
        out = F.scaled_dot_product_attention(
            q[plan.start : plan.end].transpose(0, 1).unsqueeze(0),  # (1, num_q_heads, extend_len, head_dim)
            keys,
            values,
            attn_mask=plan.mask,
            is_causal=plan.mask is None,
            enable_gqa=self._num_q_heads != self._layout.num_kv_heads,
        )
        return out.squeeze(0).transpose(0, 1).flatten(1)

    def _with_values(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat((rows, rows + self._layout.page_size))

    def _offset(self, layer: int) -> int:
        return layer * 2 * self._layout.page_size

    def _numbers(self, gathered: torch.Tensor, layer: int) -> torch.Tensor:
        if not self._quantizers:
            return gathered
        halves = zip(self._quantizers[layer], gathered.chunk(2), strict=True)
        return torch.cat([quantizer.numbers(half) for quantizer, half in halves])

    def _split_heads(self, gathered: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as (batch, num_kv_heads, kv_len, head_dim) views."""
        shape = (2, batch, -1, self._layout.num_kv_heads, self._layout.head_dim)
        keys, values = gathered.view(shape).transpose(2, 3)
        return keys, values
