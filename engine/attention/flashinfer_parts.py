"""FlashInfer's attention to the parts of prefixes (prefix_parts.py). Needs CUDA."""

from itertools import pairwise
from typing import Any, NamedTuple

import flashinfer
import numpy as np
import torch

from tandem.engine.attention.flashinfer_wrapper import Wrapper, pinned
from tandem.engine.attention.prefix_kernels import copy_queries, merge_parts
from tandem.engine.attention.prefix_parts import ENTRY_SIZE, MAX_PARTS, MAX_ROWS, CutRule, Int32s, PrefixParts
from tandem.engine.upload import to_device

# Rows of FlashInfer's tiles on Hopper.
_TILE_ROWS = {64: 192, 128: 128, 256: 128}


class PartsMemory:
    """Queries and attention of parts, shared by all forward passes because one runs at a time.

    Attributes:
        sizes: num_kv_heads as both head counts, head_dim and page_size, in plan order.
        group: query heads per key head.
        rule: for this pool and GPU.
        q, out: (MAX_ROWS * group, num_kv_heads, head_dim).
        log_sums: (MAX_ROWS * group, num_kv_heads) float32.
        beside: stream on which parts run.
    """

    def __init__(self, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        """Args: sizes: as of PagedKernels."""
        num_q_heads, num_kv_heads, head_dim, page_size = sizes
        self.sizes = num_kv_heads, num_kv_heads, head_dim, page_size
        self.group = num_q_heads // num_kv_heads
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.rule = CutRule(num_q_heads, num_kv_heads, _TILE_ROWS[head_dim], num_sms)
        rows = MAX_ROWS * self.group, num_kv_heads
        self.q, self.out = (torch.empty(*rows, head_dim, dtype=dtype, device=device) for _ in range(2))
        self.log_sums = torch.empty(rows, device=device)
        self.beside = torch.cuda.Stream(device)
        # Compile now: the first long prefix must not wait.
        q, table = self.q.new_zeros(1, num_q_heads, head_dim), torch.zeros(ENTRY_SIZE, dtype=torch.int32, device=device)
        copy_queries(q, table, self.q, num_kv_heads)
        merge_parts(q, q.new_zeros(q.shape[:2], dtype=torch.float32), table, self.out, self.log_sums, num_kv_heads)


class PartAttention:
    """Attention of whole sequences and of parts beside it, merged.

    Attributes:
        rule: for plans.
    """

    def __init__(self, memory: PartsMemory, workspace: torch.Tensor, indices: torch.Tensor | None = None) -> None:
        """Args: indices: int32, for the page ids of all parts in CUDA graphs; None: not for graphs."""
        self.rule = memory.rule
        self._memory = memory
        self._device = workspace.device
        # A graph's number of parts is fixed; some have no rows.
        self._min_parts = 0
        graphed: dict[str, Any] = {}
        if indices is not None:
            self._min_parts = MAX_PARTS
            numbers = [torch.zeros(MAX_PARTS + n, dtype=torch.int32, device=self._device) for n in (1, 1, 0)]
            graphed = {
                "use_cuda_graph": True,
                "qo_indptr_buf": numbers[0],
                "paged_kv_indptr_buf": numbers[1],
                "paged_kv_indices_buf": indices,
                "paged_kv_last_page_len_buf": numbers[2],
            }
        self._wrapper = Wrapper(
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3", **graphed)
        )
        self._num_rows = 0
        self._is_empty = False
        if indices is not None:
            self.reserve()

    def reserve(self) -> None:
        """Plans for capture: every row belongs to a part without tokens."""
        self._is_empty = False
        self._plan([0, MAX_ROWS], [0, 0], np.empty(0, np.int32))

    def plan(self, parts: PrefixParts) -> None:
        # Most prefixes are whole, and a plan takes time.
        if parts.num_parts == 0 and self._is_empty:
            return
        self._is_empty = parts.num_parts == 0
        self._plan(parts.rows, parts.first_pages, np.array(parts.pages, np.int32))

    def attend(
        self,
        whole: Wrapper,
        table: torch.Tensor,
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """
        Args:
            whole: planned without the pages in parts.
            table: of PrefixParts.
            q: (num_tokens, num_q_heads, head_dim).
            kv: the layer's pages.
        """
        heads = torch.empty_like(q) if out is None else out.view_as(q)
        log_sums = torch.empty(q.shape[:2], device=q.device)
        memory, num_kv_heads = self._memory, self._memory.sizes[1]
        current = torch.cuda.current_stream(q.device)
        memory.beside.wait_stream(current)
        with torch.cuda.stream(memory.beside):
            copy_queries(q, table, memory.q, num_kv_heads)
            if (num_rows := self._num_rows) > 0:
                planned = memory.q[:num_rows], kv, memory.out[:num_rows], memory.log_sums[:num_rows]
                self._wrapper.run_with_log_sums(*planned)
        whole.run_with_log_sums(q, kv, heads, log_sums)
        current.wait_stream(memory.beside)
        merge_parts(heads, log_sums, table, memory.out, memory.log_sums, num_kv_heads)
        return heads.flatten(1)

    def _plan(self, rows: list[int], first_pages: list[int], pages: Int32s) -> None:
        num_parts = len(rows) - 1
        num_empty = max(0, self._min_parts - num_parts)
        memory = self._memory
        group, page_size = memory.group, memory.sizes[3]
        self._num_rows = rows[-1] * group
        page_lens = [page_size if end > first else 0 for first, end in pairwise(first_pages)]
        self._wrapper.plan(
            pinned([row * group for row in (*rows, *[rows[-1]] * num_empty)]),
            pinned([*first_pages, *[first_pages[-1]] * num_empty]),
            to_device(pages, self._device),
            pinned([*page_lens, *[0] * num_empty]),
            *memory.sizes,
            causal=False,
            q_data_type=memory.q.dtype,
            kv_data_type=memory.q.dtype,
        )


class PlannedParts(NamedTuple):
    """
    Attributes:
        table: of PrefixParts, on the device, perhaps with padding.
    """

    attention: PartAttention
    table: torch.Tensor
