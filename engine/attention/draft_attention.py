"""Decode attention with drafts, of both backends with keys and values by head. Needs CUDA."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tandem.engine.attention.base import GraphedHeadAttention, PlannedAttention
from tandem.engine.attention.draft_kernels import block_of, decode_drafts, tile_of
from tandem.engine.attention.draft_plan import DraftPlans
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.norm_rotate_write import norm_rotate_write
from tandem.engine.attention.scales import KvScales
from tandem.engine.attention.triton_kernels import DECODE_PROGRAMS_PER_SM
from tandem.engine.kvcache.cuda_pool import CudaKvPool
from tandem.engine.layers.norm import QkNorm
from tandem.engine.layers.rotary import Rotation
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import Packed, aligned


class _Tables(NamedTuple):
    """DraftPlan on the device."""

    slots: torch.Tensor
    positions: torch.Tensor
    items: torch.Tensor
    rows: torch.Tensor
    pages: torch.Tensor


class DraftAttention:
    """Plans attention of decode steps whose sequences have several new tokens each."""

    def __init__(self, pool: CudaKvPool, num_q_heads: int, kv_scales: KvScales | None = None) -> None:
        layout = pool.layout
        assert isinstance(layout, KvHeadLayout)
        self._layout = layout
        self._pool = layout.view(pool.memory_and_dummy)
        self._device = pool.device
        self._num_q_heads = num_q_heads
        self._scales = kv_scales or KvScales.ones(layout.num_layers)
        self._written_scales = self._scales if layout.quantized_to else None
        num_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        self._plans = DraftPlans(
            layout,
            pool.num_pages,
            tile=tile_of(num_q_heads // layout.num_kv_heads),
            block=block_of(layout.head_dim),
            num_programs=max(1, DECODE_PROGRAMS_PER_SM * num_sms // layout.num_kv_heads),
        )

    def plan(self, sequences: Sequence[TokenSequence]) -> PlannedAttention:
        packed = self.pack(sequences, sum(s.extend_len for s in sequences))
        return _Planned(self, _Tables(*packed.to(self._device)))

    def graphed(self, sizes: Sequence[int], max_pages_per_sequence: int) -> dict[int, GraphedHeadAttention]:
        """As GraphableBackend.for_draft_graphs. Sizes share memory."""
        num_bytes = max(self.pack((), size).num_bytes for size in sizes)
        num_bytes += aligned(4 * max(sizes) * max_pages_per_sequence)
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        return {size: _Graphed(self, memory, size) for size in sizes}

    def pack(self, sequences: Sequence[TokenSequence], num_rows: int) -> Packed:
        return Packed(*self._plans.build(sequences, num_rows))

    def attend(
        self,
        tables: _Tables,
        qkv: torch.Tensor,
        rotation: Rotation,
        qk_norm: QkNorm | None,
        layer: int,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """As PlannedAttention.attend."""
        q = norm_rotate_write(
            qkv,
            self._num_q_heads,
            rotation,
            qk_norm,
            self._pool,
            layer,
            tables.slots,
            kv_scales=self._written_scales,
        )
        out = torch.empty_like(q) if out is None else out.view_as(q)
        where = tables.items, tables.rows, tables.pages
        return decode_drafts(q, self._pool, layer, *where, self._scales, out).flatten(1)


class _Planned(PlannedAttention):
    def __init__(self, attention: DraftAttention, tables: _Tables) -> None:
        self._attention = attention
        self._tables = tables

    def attend(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        qk_norm: QkNorm | None,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._attention.attend(self._tables, qkv, rotation, qk_norm, layer, out)


class _Graphed(GraphedHeadAttention):
    def __init__(self, attention: DraftAttention, memory: torch.Tensor, num_rows: int) -> None:
        self._attention = attention
        self._memory = memory
        self._num_rows = num_rows
        self._tables = _Tables(*attention.pack((), num_rows).views(memory))
        self.positions = self._tables.positions

    def plan(self, sequences: Sequence[TokenSequence]) -> None:
        self._attention.pack(sequences, self._num_rows).copy_to(self._memory)

    def attend(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        qk_norm: QkNorm | None,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._attention.attend(self._tables, qkv, rotation, qk_norm, layer, out)
