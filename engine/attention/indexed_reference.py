"""Attention over chosen latents in plain torch, on any device."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tandem.engine.attention.base import Index, IndexedBackend, LatentHeads
from tandem.engine.attention.indexed_layout import IndexedLayout
from tandem.engine.attention.page_tables import prefill_slots
from tandem.engine.attention.scales import KvScales
from tandem.engine.batch import Batch
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.layers.norm import Norm, rms_norm
from tandem.engine.layers.rotary import Rotation, rotate, rotate_pairs
from tandem.engine.token_sequence import TokenSequence


class Places(NamedTuple):
    """
    Attributes:
        pages, offsets: (num_tokens,) int64, of tokens in the pool.
    """

    pages: torch.Tensor
    offsets: torch.Tensor


class _Planned(NamedTuple):
    """
    Attributes:
        start, end: the sequence's range of the token dimension.
        places: of all its tokens.
        is_future: (extend_len, device_len) bool.
    """

    start: int
    end: int
    places: Places
    is_future: torch.Tensor


class IndexedReferenceAttention(IndexedBackend):
    """Scores all tokens of a sequence, then attends with a mask of those chosen.

    New latents and index keys are read from their pages too, so the cached prefix does not change the output.
    """

    computes_mixed = True
    computes_drafts = True

    def __init__(self, pool: KvPool, num_q_heads: int, kv_scales: KvScales | None = None) -> None:
        layout = pool.layout
        assert isinstance(layout, IndexedLayout)
        self._layout = layout
        self._device = pool.device
        self._latents, self._index_keys = layout.views(pool.memory)
        self._written: Places | None = None
        self._planned: list[_Planned] = []

    @torch.inference_mode()
    def plan(self, batch: Batch) -> None:
        self._plan_writing(batch)
        self._plan_each(batch.sequences, 0)

    def _plan_writing(self, batch: Batch) -> None:
        slots = torch.from_numpy(prefill_slots(self._layout, batch.sequences)).to(self._device)
        self._written = Places(slots // self._layout.page_size, slots % self._layout.page_size)

    def _plan_each(self, sequences: Sequence[TokenSequence], start: int) -> None:
        """Args: start: of the first in the token dimension."""
        self._planned = []
        for s in sequences:
            end = start + s.extend_len
            tokens = torch.arange(s.device_len, device=self._device)
            is_future = tokens > tokens[s.cached_len :, None]
            self._planned.append(_Planned(start, end, self._places(s, tokens), is_future))
            start = end

    @torch.inference_mode()
    def attend(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        norm: Norm,
        rotation: Rotation,
        heads: LatentHeads,
        index: Index,
        layer: int,
    ) -> torch.Tensor:
        q, queries = self._write(q, kv, norm, rotation, index, layer)
        return torch.cat(self._attend_each(q, queries, heads, index, layer))

    def _write(
        self, q: torch.Tensor, kv: torch.Tensor, norm: Norm, rotation: Rotation, index: Index, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes latents and index keys into their pages, and returns rotated queries and index queries."""
        assert self._written is not None
        layout = self._layout
        latents, k_rope = kv.split((layout.kv_rank, layout.rope_dim), dim=-1)
        q_nope, q_rope = q.split((q.shape[-1] - layout.rope_dim, layout.rope_dim), dim=-1)
        q = torch.cat((q_nope, rotate_pairs(q_rope, *rotation.cos_sin)), dim=-1)
        k_rope = rotate_pairs(k_rope[:, None], *rotation.cos_sin)[:, 0]
        pages, offsets = self._written
        self._latents[pages, layer, offsets] = torch.cat((rms_norm(latents, *norm), k_rope), dim=-1)
        self._index_keys[pages, layer, offsets] = self._rotated(index.keys[:, None], rotation)[:, 0]
        return q, self._rotated(index.queries, rotation)

    def _attend_each(
        self, q: torch.Tensor, queries: torch.Tensor, heads: LatentHeads, index: Index, layer: int
    ) -> list[torch.Tensor]:
        """Args: q, queries: of `_write`."""
        outputs = []
        for planned in self._planned:
            new = slice(planned.start, planned.end)
            mask = self._chosen(planned, queries[new], index.weights[new], index.top_k, layer)
            outputs.append(self._attend(planned, q[new], mask, heads, layer))
        return outputs

    def _rotated(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        turned, kept = x.split((self._layout.rope_dim, self._layout.index_dim - self._layout.rope_dim), dim=-1)
        return torch.cat((rotate(turned, *rotation.cos_sin), kept), dim=-1)

    def _chosen(
        self, planned: _Planned, queries: torch.Tensor, weights: torch.Tensor, top_k: int, layer: int
    ) -> torch.Tensor:
        """Returns (extend_len, device_len) bool."""
        is_past = ~planned.is_future
        if is_past.shape[1] <= top_k:
            return is_past
        keys = self._index_keys[planned.places.pages, layer, planned.places.offsets].float()
        products = (queries.float() @ keys.T).relu_()  # (extend_len, num_index_heads, device_len)
        scores = (weights[:, None] @ products)[:, 0].masked_fill_(planned.is_future, float("-inf"))
        first = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        return torch.zeros_like(is_past).scatter_(1, first, True) & is_past

    def _attend(
        self, planned: _Planned, q: torch.Tensor, mask: torch.Tensor, heads: LatentHeads, layer: int
    ) -> torch.Tensor:
        gathered = self._latents[planned.places.pages, layer, planned.places.offsets]
        latents, k_rope = gathered.split((self._layout.kv_rank, self._layout.rope_dim), dim=-1)
        k_nope = torch.matmul(latents, heads.keys.transpose(1, 2))  # (num_heads, device_len, nope_dim)
        keys = torch.cat((k_nope, k_rope.expand(len(k_nope), -1, -1)), dim=-1)
        values = torch.matmul(latents, heads.values.transpose(1, 2))  # (num_heads, device_len, value_dim)
        out = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=mask, scale=heads.scale)
        return out.transpose(0, 1).flatten(1)

    def _places(self, sequence: TokenSequence, tokens: torch.Tensor) -> Places:
        num_pages = self._layout.num_pages_for(sequence.device_len)
        table = torch.tensor(list(sequence.page_ids[:num_pages]), device=self._device)
        return Places(table[tokens // self._layout.page_size], tokens % self._layout.page_size)
