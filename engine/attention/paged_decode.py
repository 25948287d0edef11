"""Decode attention by paged_decode.cu, one launch per layer. Needs CUDA."""

from collections.abc import Sequence

import torch

from tandem.engine.attention.base import GraphedHeadAttention, PlannedAttention
from tandem.engine.attention.decode_plan import DecodeBlocks, DecodePlan
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.scales import KvScales
from tandem.engine.kvcache.cuda_pool import CudaKvPool
from tandem.engine.layers.cuda_kernel import CudaKernel
from tandem.engine.layers.norm import QkNorm
from tandem.engine.layers.rotary import Rotation
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import Packed, aligned

HEAD_DIMS = (64, 128)
MAX_GROUP = 8
# Scores are in units of log 2, for the hardware exponential.
LOG2_E = 1.4426950408889634


def has_kernel(layout: KvHeadLayout, num_q_heads: int) -> bool:
    group, remainder = divmod(num_q_heads, layout.num_kv_heads)
    return layout.dtype == "bfloat16" and layout.head_dim in HEAD_DIMS and remainder == 0 and group <= MAX_GROUP


class PagedDecode:
    """The kernel and its memory, shared by all batch sizes because one step runs at a time."""

    def __init__(
        self, pool: CudaKvPool, num_q_heads: int, max_batch_size: int, kv_scales: KvScales | None = None
    ) -> None:
        layout = pool.layout
        assert isinstance(layout, KvHeadLayout)
        self._layout = layout
        self._scales = kv_scales or KvScales.ones(layout.num_layers)
        self.device = pool.device
        num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.plans = DecodePlan(layout, num_sms, dummy_page=pool.num_pages)
        self._num_q_heads = num_q_heads
        self._layer_stride = 2 * layout.page_size * layout.num_kv_heads * layout.head_dim
        max_items = max(self.plans.max_items(size) for size in range(1, max_batch_size + 1))
        self._pool = layout.view(pool.memory_and_dummy)
        assert self._pool.stride(0) < 2**31
        self._parts = torch.empty(max_items * num_q_heads * layout.head_dim, device=self.device)
        self._part_scales = torch.empty(max_items * num_q_heads * 2, device=self.device)
        self._arrivals = torch.zeros(max_batch_size * layout.num_kv_heads, dtype=torch.int32, device=self.device)
        self._kernels: dict[tuple[bool, DecodeBlocks], CudaKernel] = {}

    def plan(self, sequences: Sequence[TokenSequence], num_rows: int) -> Packed:
        return Packed(self.plans.build(sequences, num_rows))

    def launch(
        self,
        plan: torch.Tensor,
        qkv: torch.Tensor,
        rotation: Rotation,
        qk_norm: QkNorm | None,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As PlannedAttention.attend."""
        layout = self._layout
        assert qkv.is_contiguous()
        num_rows = len(qkv)
        if out is None:
            out = qkv.new_empty(num_rows, self._num_q_heads * layout.head_dim)
        blocks = self.plans.blocks(num_rows)
        k_scale, v_scale = self._scales.keys[layer], self._scales.values[layer]
        self._kernel(qk_norm is not None, blocks).launch(
            (layout.num_kv_heads, self.plans.max_blocks(num_rows)),
            blocks.num_warps * 32,
            qkv,
            self._pool,
            plan,
            rotation.tables.cos,
            rotation.tables.sin,
            qk_norm.weight if qk_norm else None,
            out,
            self._parts,
            self._part_scales,
            self._arrivals,
            self._pool.stride(0),
            layer * self._layer_stride,
            num_rows,
            self.plans.max_items(num_rows),
            qk_norm.eps if qk_norm else 0.0,
            layout.head_dim**-0.5 * LOG2_E * k_scale,
            v_scale,
            1.0 / k_scale,
            1.0 / v_scale,
        )
        return out

    def _kernel(self, has_norm: bool, blocks: DecodeBlocks) -> CudaKernel:
        key = has_norm, blocks
        if key not in self._kernels:
            layout = self._layout
            macros = {
                "HEAD_DIM": layout.head_dim,
                "GROUP": self._num_q_heads // layout.num_kv_heads,
                "NUM_KV": layout.num_kv_heads,
                "PAGE_SIZE": layout.page_size,
                "NORM": int(has_norm),
                "FP8": int(layout.quantized_to == "float8_e4m3fn"),
                "WARPS": blocks.num_warps,
                "BLOCKS": blocks.num_per_sm,
            }
            self._kernels[key] = CudaKernel(__package__, "paged_decode", macros, self.device)
        return self._kernels[key]


class PlannedPagedDecode(PlannedAttention):
    def __init__(self, decode: PagedDecode, plan: torch.Tensor) -> None:
        self._decode = decode
        self._plan = plan

    def attend(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        qk_norm: QkNorm | None,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._decode.launch(self._plan, qkv, rotation, qk_norm, layer, out)


class GraphedPagedDecode(GraphedHeadAttention):
    def __init__(self, decode: PagedDecode, batch_size: int, plan_memory: torch.Tensor) -> None:
        """Args: plan_memory: uint8 on the device, room for a plan; sizes may share it."""
        self._decode = decode
        self._batch_size = batch_size
        self._memory = plan_memory
        self._plan = plan_memory.view(torch.int32)
        self.positions = self._plan[decode.plans.positions(batch_size)]

    def plan(self, sequences: Sequence[TokenSequence]) -> None:
        self._decode.plan(sequences, self._batch_size).copy_to(self._memory)

    def attend(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        qk_norm: QkNorm | None,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._decode.launch(self._plan, qkv, rotation, qk_norm, layer, out)


def graphed_paged_decodes(
    decode: PagedDecode, batch_sizes: Sequence[int], max_pages_per_sequence: int
) -> dict[int, GraphedHeadAttention]:
    # A smaller size may have the largest plan. The extra page is the padding's.
    num_plan = max(decode.plans.size(size, size * max_pages_per_sequence + 1) for size in batch_sizes)
    memory = torch.zeros(aligned(4 * num_plan), dtype=torch.uint8, device=decode.device)
    return {size: GraphedPagedDecode(decode, size, memory) for size in batch_sizes}
