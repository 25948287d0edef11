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
# Blocks that a multiprocessor runs at once.
BLOCKS_PER_SM = 2
# Into how many items each of many sequences may be cut.
NUM_CUTS = (1, 2, 3)
# Numbers of a plan: before its items, and of an item. Threads load four at a time.
HEAD_SIZE = 4
ITEM_SIZE = 8
# Queries' scores are in units of log 2, which is what the hardware's exponential takes.
LOG2_E = 1.4426950408889634


def has_kernel(layout: PageLayout, num_q_heads: int) -> bool:
    """Whether the kernel computes such heads."""
    group, remainder = divmod(num_q_heads, layout.num_kv_heads)
    return layout.dtype == "bfloat16" and layout.head_dim in HEAD_DIMS and remainder == 0 and group <= MAX_GROUP


class PagedDecode:
    """The kernel with the memory that steps of all batch sizes share, for one of them runs at a time."""

    def __init__(self, pool: CudaKvPool, num_q_heads: int, max_batch_size: int) -> None:
        layout = self._layout = pool.layout
        self.device = pool.kv.device
        self._dummy_page = pool.num_pages
        self._num_q_heads = num_q_heads
        self._num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        # Items that run at once.
        self._wave = -(-BLOCKS_PER_SM * self._num_sms // layout.num_kv_heads)
        max_items = max(self._max_items(size) for size in range(1, max_batch_size + 1))
        self._pool = pool.all_kv
        self._parts = torch.empty(max_items * num_q_heads * layout.head_dim, device=self.device)
        self._part_scales = torch.empty(max_items * num_q_heads * 2, device=self.device)
        self._arrivals = torch.zeros(max_batch_size * layout.num_kv_heads, dtype=torch.int32, device=self.device)
        self._kernels: dict[tuple[bool, int], CudaKernel] = {}

    def plan_size(self, num_rows: int, num_pages: int) -> int:
        """Numbers in a plan whose page tables have so many pages together."""
        return self._positions(num_rows).stop + num_pages

    def positions(self, plan: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Of the new tokens, (num_rows,), in a plan or in memory for one."""
        return plan[self._positions(num_rows)]

    def plan(self, sequences: SequenceOf[Sequence], num_rows: int) -> torch.Tensor:
        """What the kernel is told of a step, int32 side by side in pinned memory:

        - HEAD_SIZE, the first of them the number of items;
        - ITEM_SIZE for each item, see paged_decode.cu: room for as many items as there can be;
        - for each row the new token's position;
        - the page tables.

        Rows beyond the sequences are one token on the dummy page.
        """
        num_padding = num_rows - len(sequences)
        tables = array("i")
        starts = []
        for s in sequences:
            starts.append(len(tables))
            tables.extend(s.page_ids[: self._layout.num_pages_for(s.device_len)])
        starts += [len(tables)] * num_padding
        tables.append(self._dummy_page)
        lengths = np.ones(num_rows, dtype=np.int32)
        lengths[: len(sequences)] = [s.device_len for s in sequences]
        # Items of about the same length, and each row's of the same, for a short one at a row's end would take a block
        # as well. They are whole turns of a block, so there may be fewer of them in the end.
        turn = self._num_warps(num_rows) * TILE
        shares = np.maximum(1, np.rint(lengths * (self._target_items(num_rows) / lengths.sum()))).astype(np.int32)
        stretches = -(-lengths // (shares * turn)) * turn
        num_items = -(-lengths // stretches)
        total = int(num_items.sum())
        # Rounded shares are at most one more than the exact ones for each row.
        assert total <= self._max_items(num_rows)

        host = torch.empty(self.plan_size(num_rows, len(tables)), dtype=torch.int32, pin_memory=True)
        plan = host.numpy()
        plan[0] = total
        rows = np.repeat(np.arange(num_rows), num_items)
        numbers = np.arange(total) - np.repeat(num_items.cumsum() - num_items, num_items)
        begins = numbers * stretches[rows]
        ends = np.minimum(begins + stretches[rows], lengths[rows])
        columns = (rows, begins, ends, lengths[rows], np.array(starts)[rows], numbers, num_items[rows])
        items = plan[HEAD_SIZE : HEAD_SIZE + total * ITEM_SIZE].reshape(total, ITEM_SIZE)
        for place, column in enumerate(columns):
            items[:, place] = column
        plan[self._positions(num_rows)] = lengths - 1
        plan[self._positions(num_rows).stop :] = tables
        return host

    def launch(
        self, plan: torch.Tensor, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, layer: int
    ) -> torch.Tensor:
        """Attention.attend; a plan says more than `rotation` about positions. Args: plan: on the device."""
        layout = self._layout
        assert qkv.is_contiguous()
        num_rows = len(qkv)
        out = qkv.new_empty(num_rows, self._num_q_heads * layout.head_dim)
        layer_stride = 2 * layout.page_size * layout.num_kv_heads * layout.head_dim
        num_warps, max_items = self._num_warps(num_rows), self._max_items(num_rows)
        self._kernel(qk_norm is not None, num_warps).launch(
            (max_items, layout.num_kv_heads),
            num_warps * 32,
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
            layout.num_layers * layer_stride,
            layer * layer_stride,
            num_rows,
            max_items,
            qk_norm.eps if qk_norm else 0.0,
            layout.head_dim**-0.5 * LOG2_E,
        )
        return out

    def _positions(self, num_rows: int) -> slice:
        begin = HEAD_SIZE + ITEM_SIZE * self._max_items(num_rows)
        return slice(begin, begin + num_rows)

    def _target_items(self, num_rows: int) -> int:
        """About as many items as sequences are cut into, all together: one wave; or where there are more sequences than
        that, so many for each that the last wave is as full as can be."""
        if num_rows <= self._wave:
            return self._wave
        return num_rows * min(NUM_CUTS, key=lambda cuts: -(-num_rows * cuts // self._wave) / cuts)

    def _max_items(self, num_rows: int) -> int:
        return num_rows + self._target_items(num_rows)

    def _num_warps(self, num_rows: int) -> int:
        return WARPS_OF_FEW if 4 * num_rows * self._layout.num_kv_heads <= self._num_sms else WARPS

    def _kernel(self, has_norm: bool, num_warps: int) -> CudaKernel:
        key = has_norm, num_warps
        if key not in self._kernels:
            layout = self._layout
            macros = {
                "HEAD_DIM": layout.head_dim,
                "GROUP": self._num_q_heads // layout.num_kv_heads,
                "NUM_KV": layout.num_kv_heads,
                "PAGE_SIZE": layout.page_size,
                "NORM": int(has_norm),
                "WARPS": num_warps,
            }
            self._kernels[key] = CudaKernel("paged_decode", macros, self.device)
        return self._kernels[key]


class GraphedPagedDecode(GraphedAttention):
    """Decode attention of one batch size."""

    def __init__(self, decode: PagedDecode, batch_size: int, plan_memory: torch.Tensor) -> None:
        """Args: plan_memory: int32 on the device, room for a plan; all sizes may have the same."""
        self._decode = decode
        self._batch_size = batch_size
        self._plan = plan_memory
        self.positions = decode.positions(plan_memory, batch_size)

    def plan(self, sequences: SequenceOf[Sequence]) -> None:
        host = self._decode.plan(sequences, self._batch_size)
        self._plan[: len(host)].copy_(host, non_blocking=True)

    def attend(
        self, qkv: torch.Tensor, num_q_heads: int, rotation: Rotation, qk_norm: QkNorm | None, layer: int
    ) -> torch.Tensor:
        return self._decode.launch(self._plan, qkv, rotation, qk_norm, layer)
