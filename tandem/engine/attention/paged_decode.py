"""Attention of decode steps by a kernel of our own, paged_decode.cu: one launch for a layer, no plan but page tables.
Imported on CUDA machines alone."""

from array import array
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from tandem.engine.attention.base import GraphedAttention
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.cuda_pool import CudaKvPool
from tandem.engine.layers.cuda_kernel import CudaKernel
from tandem.engine.layers.norm import QkNorm
from tandem.engine.layers.rotary import Rotation
from tandem.engine.request import Sequence

HEAD_DIMS = (64, 128)
MAX_GROUP = 8
# Tokens that a warp takes at a time.
TILE = 16
# Warps of a block; and where a step has so few sequences that a block has to be done soon.
WARPS = 4
WARPS_OF_FEW = 8
# Blocks for each multiprocessor that sequences are cut into items for.
BLOCKS_PER_SM = 2
# Queries' scores are in units of log 2, which is what the hardware's exponential takes.
LOG2_E = 1.4426950408889634


def has_kernel(layout: PageLayout, num_q_heads: int) -> bool:
    """Whether the kernel computes such heads."""
    group, remainder = divmod(num_q_heads, layout.num_kv_heads)
    return layout.dtype == "bfloat16" and layout.head_dim in HEAD_DIMS and remainder == 0 and group <= MAX_GROUP


class PagedDecode:
    """The kernel with the memory that steps of all batch sizes share, for one of them runs at a time."""

    def __init__(self, pool: CudaKvPool, num_q_heads: int, max_batch_size: int, max_pages_per_sequence: int) -> None:
        layout = self.layout = pool.layout
        device = pool.kv.device
        self.dummy_page = pool.num_pages
        self.num_q_heads = num_q_heads
        num_sms = self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        # Sequences are cut so that about so many items come of a step, besides a last one for each sequence.
        self.target_items = -(-BLOCKS_PER_SM * num_sms // layout.num_kv_heads)
        max_items = max_batch_size + self.target_items
        num_plan = 2 + 2 * max_batch_size + 2 * max_items + max_batch_size * max_pages_per_sequence
        self.plan_memory = torch.zeros(num_plan, dtype=torch.int32, device=device)
        self._pool = pool.all_kv
        self._parts = torch.empty(max_items * num_q_heads * layout.head_dim, device=device)
        self._part_scales = torch.empty(max_items * num_q_heads * 2, device=device)
        self._arrivals = torch.zeros(max_batch_size * layout.num_kv_heads, dtype=torch.int32, device=device)
        self._kernels: dict[tuple[bool, int], CudaKernel] = {}

    def num_warps(self, batch_size: int) -> int:
        """In a block, for steps of a size."""
        return WARPS_OF_FEW if 4 * batch_size * self.layout.num_kv_heads <= self._num_sms else WARPS

    def launch(
        self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, layer: int, max_items: int
    ) -> torch.Tensor:
        """Attention.attend for the plan in plan_memory."""
        layout = self.layout
        assert qkv.is_contiguous()
        out = qkv.new_empty(len(qkv), self.num_q_heads * layout.head_dim)
        layer_stride = 2 * layout.page_size * layout.num_kv_heads * layout.head_dim
        num_warps = self.num_warps(len(qkv))
        self._kernel(qk_norm is not None, num_warps).launch(
            (max_items, layout.num_kv_heads),
            num_warps * 32,
            qkv,
            self._pool,
            self.plan_memory,
            rotation.tables.cos,
            rotation.tables.sin,
            qk_norm.weight if qk_norm else None,
            out,
            self._parts,
            self._part_scales,
            self._arrivals,
            layout.num_layers * layer_stride,
            layer * layer_stride,
            len(qkv),
            max_items,
            qk_norm.eps if qk_norm else 0.0,
            layout.head_dim**-0.5 * LOG2_E,
        )
        return out

    def _kernel(self, has_norm: bool, num_warps: int) -> CudaKernel:
        key = has_norm, num_warps
        if key not in self._kernels:
            layout = self.layout
            macros = {
                "HEAD_DIM": layout.head_dim,
                "GROUP": self.num_q_heads // layout.num_kv_heads,
                "NUM_KV": layout.num_kv_heads,
                "PAGE_SIZE": layout.page_size,
                "NORM": int(has_norm),
                "WARPS": num_warps,
            }
            self._kernels[key] = CudaKernel("paged_decode", macros, self.plan_memory.device)
        return self._kernels[key]


class GraphedPagedDecode(GraphedAttention):
    """Decode attention of one batch size."""

    def __init__(self, decode: PagedDecode, batch_size: int) -> None:
        self._decode = decode
        self._batch_size = batch_size
        self._max_items = batch_size + decode.target_items
        self._block_tokens = decode.num_warps(batch_size) * TILE
        self.positions = decode.plan_memory[2 : 2 + batch_size]

    def plan(self, sequences: SequenceOf[Sequence]) -> None:
        """What the kernel reads, int32 side by side:

        - the number of items, and of tokens in each;
        - for each row the new token's position, and where its page table begins among the tables;
        - for each item its row, and which of the row's items it is: room for max_items;
        - the page tables.
        """
        layout, num_rows, max_items = self._decode.layout, self._batch_size, self._max_items
        num_padding = num_rows - len(sequences)
        tables = array("i")
        starts = []
        for s in sequences:
            starts.append(len(tables))
            tables.extend(s.page_ids[: layout.num_pages_for(s.device_len)])
        starts += [len(tables)] * num_padding
        tables.append(self._decode.dummy_page)
        lengths = np.ones(num_rows, dtype=np.int32)
        lengths[: len(sequences)] = [s.device_len for s in sequences]
        # Whole turns of a block, and so long that there are no more items than room for them.
        num_turns = -(-int(lengths.sum()) // (self._decode.target_items * self._block_tokens))
        stretch = num_turns * self._block_tokens
        num_items = -(-lengths // stretch)
        last_items = num_items.cumsum()
        total = int(last_items[-1])
        assert total <= max_items

        num_head = 2 + 2 * num_rows + 2 * max_items
        host = torch.empty(num_head + len(tables), dtype=torch.int32, pin_memory=True)
        plan = host.numpy()
        plan[:2] = total, stretch
        plan[2 : 2 + num_rows] = lengths - 1
        plan[2 + num_rows : 2 + 2 * num_rows] = starts
        items = plan[2 + 2 * num_rows : num_head].reshape(2, max_items)
        items[0, :total] = np.repeat(np.arange(num_rows), num_items)
        items[1, :total] = np.arange(total) - np.repeat(last_items - num_items, num_items)
        plan[num_head:] = tables
        self._decode.plan_memory[: len(host)].copy_(host, non_blocking=True)

    def attend(
        self, qkv: torch.Tensor, num_q_heads: int, rotation: Rotation, qk_norm: QkNorm | None, layer: int
    ) -> torch.Tensor:
        return self._decode.launch(qkv, rotation, qk_norm, layer, self._max_items)
