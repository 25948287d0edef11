"""Attention by Tandem's Triton kernels. Needs CUDA."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from tandem.engine.attention.base import (
    GraphableHeadBackend,
    GraphedAttention,
    GraphedHeadAttention,
    HeadAttention,
    PlannedAttention,
)
from tandem.engine.attention.draft_attention import DraftAttention
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.mixed import graphed_by_kind, plan_by_kind
from tandem.engine.attention.norm_rotate_write import norm_rotate_write, why_not_written
from tandem.engine.attention.page_tables import decode_slots, page_tables, prefill_slots
from tandem.engine.attention.scales import KvScales
from tandem.engine.attention.triton_kernels import decode, num_decode_splits, prefill, queries_per_tile
from tandem.engine.batch import Batch
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.cuda_pool import CudaKvPool
from tandem.engine.layers.norm import QkNorm
from tandem.engine.layers.rotary import Rotation
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import Packed, aligned

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)


class _DecodeTables(NamedTuple):
    slots: torch.Tensor
    positions: torch.Tensor
    first_pages: torch.Tensor
    pages: torch.Tensor


class _PrefillTables(NamedTuple):
    """With flattened tiles."""

    slots: torch.Tensor
    tiles: torch.Tensor
    pages: torch.Tensor


class TritonAttention(GraphableHeadBackend):
    reads_quantized = True
    computes_mixed = True
    computes_drafts = True

    @classmethod
    def why_not(cls, layout: PageLayout, num_q_heads: int, device: torch.device) -> str:
        if not isinstance(layout, KvHeadLayout):
            return super().why_not(layout, num_q_heads, device)
        if device.type != "cuda":
            return f"the Triton kernels run on GPUs, not on {device.type}"
        if layout.dtype not in DTYPES:
            return f"the Triton kernels compute {' and '.join(DTYPES)}, not {layout.dtype}"
        if layout.head_dim not in HEAD_DIMS:
            return f"the Triton kernels compute heads of {', '.join(map(str, HEAD_DIMS))}, not {layout.head_dim}"
        return why_not_written(layout, device)

    def __init__(self, pool: CudaKvPool, num_q_heads: int, kv_scales: KvScales | None = None) -> None:
        layout = pool.layout
        assert isinstance(layout, KvHeadLayout)
        assert num_q_heads % layout.num_kv_heads == 0
        self._layout = layout
        self._num_columns = num_q_heads * layout.head_dim
        self._kernels = _Kernels(layout, layout.view(pool.memory_and_dummy), num_q_heads, kv_scales)
        self._dummy_page = pool.num_pages
        self._device = pool.device
        self._num_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        self._queries_per_tile = queries_per_tile(num_q_heads, layout.num_kv_heads)
        self._drafts = DraftAttention(pool, num_q_heads, kv_scales)
        self._planned: HeadAttention | None = None

    def plan(self, batch: Batch) -> None:
        self._planned = plan_by_kind(batch, self._plan_decode, self._plan_prefill, self._num_columns, self._device)

    def attend(self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, layer: int) -> torch.Tensor:
        assert self._planned is not None
        return self._planned.attend(qkv, rotation, qk_norm, layer)

    def _plan_decode(self, sequences: Sequence[TokenSequence]) -> PlannedAttention:
        if any(s.draft_ids for s in sequences):
            return self._drafts.plan(sequences)
        packed = _pack_decode(self._layout, sequences, 0, self._dummy_page)
        num_splits = num_decode_splits(len(sequences), self._layout.num_kv_heads, self._num_sms)
        return _PlannedDecode(self._kernels, _DecodeTables(*packed.to(self._device)), num_splits)

    def _plan_prefill(self, sequences: Sequence[TokenSequence]) -> PlannedAttention:
        packed = _pack_prefill(self._layout, sequences, self._queries_per_tile)
        return _PlannedPrefill(self._kernels, _PrefillTables(*packed.to(self._device)))

    def for_graphs(self, batch_sizes: Sequence[int], max_pages_per_sequence: int) -> dict[int, GraphedHeadAttention]:
        largest = max(batch_sizes)
        num_bytes = _pack_decode(self._layout, (), largest, self._dummy_page).num_bytes
        num_bytes += aligned(4 * largest * max_pages_per_sequence)
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        return {
            size: _GraphedDecode(
                self._kernels,
                self._dummy_page,
                memory,
                size,
                num_decode_splits(size, self._layout.num_kv_heads, self._num_sms),
            )
            for size in batch_sizes
        }

    def for_draft_graphs(self, sizes: Sequence[int], max_pages_per_sequence: int) -> dict[int, GraphedHeadAttention]:
        return self._drafts.graphed(sizes, max_pages_per_sequence)

    def joined(self, decode: GraphedAttention, prefill: GraphedAttention) -> HeadAttention:
        return graphed_by_kind(decode, prefill, self._num_columns)


class _Kernels:
    def __init__(self, layout: KvHeadLayout, pool: torch.Tensor, num_q_heads: int, kv_scales: KvScales | None) -> None:
        self.layout = layout
        self._pool = pool
        self._num_q_heads = num_q_heads
        self._scales = kv_scales or KvScales.ones(layout.num_layers)
        self._written_scales = self._scales if layout.quantized_to else None

    def prefill(
        self,
        tables: _PrefillTables,
        qkv: torch.Tensor,
        rotation: Rotation,
        qk_norm: QkNorm | None,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q = self._write(tables.slots, qkv, rotation, qk_norm, layer)
        out = torch.empty_like(q) if out is None else out.view_as(q)
        return prefill(q, self._pool, layer, tables.tiles.view(-1, 4), tables.pages, self._scales, out).flatten(1)

    def decode(
        self,
        tables: _DecodeTables,
        num_splits: int,
        qkv: torch.Tensor,
        rotation: Rotation,
        qk_norm: QkNorm | None,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q = self._write(tables.slots, qkv, rotation, qk_norm, layer)
        out = torch.empty_like(q) if out is None else out.view_as(q)
        where = tables.positions, tables.first_pages, tables.pages
        return decode(q, self._pool, layer, *where, num_splits, self._scales, out).flatten(1)

    def _write(
        self, slots: torch.Tensor, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, layer: int
    ) -> torch.Tensor:
        return norm_rotate_write(
            qkv, self._num_q_heads, rotation, qk_norm, self._pool, layer, slots, kv_scales=self._written_scales
        )


class _PlannedPrefill(PlannedAttention):
    def __init__(self, kernels: _Kernels, tables: _PrefillTables) -> None:
        self._kernels = kernels
        self._tables = tables

    def attend(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        qk_norm: QkNorm | None,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._kernels.prefill(self._tables, qkv, rotation, qk_norm, layer, out)


class _PlannedDecode(PlannedAttention):
    def __init__(self, kernels: _Kernels, tables: _DecodeTables, num_splits: int) -> None:
        self._kernels = kernels
        self._tables = tables
        self._num_splits = num_splits

    def attend(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        qk_norm: QkNorm | None,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._kernels.decode(self._tables, self._num_splits, qkv, rotation, qk_norm, layer, out)


class _GraphedDecode(GraphedHeadAttention):
    def __init__(
        self, kernels: _Kernels, dummy_page: int, memory: torch.Tensor, batch_size: int, num_splits: int
    ) -> None:
        self._kernels = kernels
        self._dummy_page = dummy_page
        self._memory = memory
        self._batch_size = batch_size
        self._num_splits = num_splits
        self._tables = _DecodeTables(*self._pack(()).views(memory))
        self.positions = self._tables.positions

    def plan(self, sequences: Sequence[TokenSequence]) -> None:
        self._pack(sequences).copy_to(self._memory)

    def attend(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        qk_norm: QkNorm | None,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._kernels.decode(self._tables, self._num_splits, qkv, rotation, qk_norm, layer, out)

    def _pack(self, sequences: Sequence[TokenSequence]) -> Packed:
        num_padding = self._batch_size - len(sequences)
        return _pack_decode(self._kernels.layout, sequences, num_padding, self._dummy_page)


def _pack_decode(layout: PageLayout, sequences: Sequence[TokenSequence], num_padding: int, dummy_page: int) -> Packed:
    positions = [s.cached_len for s in sequences] + [0] * num_padding
    pages, first_pages = page_tables(layout, sequences)
    first_pages += [len(pages)] * num_padding
    pages.append(dummy_page)
    return Packed(
        decode_slots(layout, sequences, num_padding, dummy_page),
        np.array(positions, np.int32),
        np.array(first_pages, np.int32),
        np.array(pages, np.int32),
    )


def _pack_prefill(layout: PageLayout, sequences: Sequence[TokenSequence], queries_per_tile: int) -> Packed:
    pages, first_pages = page_tables(layout, sequences)
    tiles = []
    num_tokens = 0
    for s, first_page in zip(sequences, first_pages, strict=True):
        first = np.arange(0, s.extend_len, queries_per_tile, dtype=np.int32)
        num_queries = np.minimum(queries_per_tile, s.extend_len - first)
        tiles.append(
            np.stack((num_tokens + first, num_queries, s.cached_len + first, np.full_like(first, first_page)), axis=1)
        )
        num_tokens += s.extend_len
    table = np.concatenate(tiles)
    # Longest tiles first: a long tile started last would run alone.
    table = table[np.argsort(-(table[:, 1] + table[:, 2]), kind="stable")]
    return Packed(prefill_slots(layout, sequences), table.reshape(-1), np.array(pages, np.int32))
