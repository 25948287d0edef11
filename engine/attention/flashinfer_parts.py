"""FlashInfer's attention to the parts of prefixes (prefix_parts.py). Needs CUDA."""

from itertools import pairwise

import flashinfer
import numpy as np
import torch

from tandem.engine.attention.flashinfer_wrapper import Wrapper, pinned
from tandem.engine.attention.prefix_kernels import copy_queries, merge_parts
from tandem.engine.attention.prefix_parts import ENTRY_SIZE, MAX_PARTS, MAX_ROWS, MAX_TOKENS, CutRule, PrefixParts
from tandem.engine.upload import Packed

# Rows of FlashInfer's tiles on Hopper.
_TILE_ROWS = {64: 192, 128: 128, 256: 128}


class PartAttention:
    """Attention of whole sequences and of parts beside it, merged.

    CUDA graphs of all sizes and single launches share one, because each is planned before it runs, and one runs at a
    time.

    Attributes:
        rule: for plans.
    """

    def __init__(self, num_q_heads: int, kv: tuple[torch.Tensor, torch.Tensor], workspace: torch.Tensor) -> None:
        """Args: kv: as of attend, any layer's."""
        num_pages, page_size, num_kv_heads, head_dim = kv[0].shape
        dtype, device = kv[0].dtype, workspace.device
        self._sizes = num_kv_heads, num_kv_heads, head_dim, page_size
        self._group = num_q_heads // num_kv_heads
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.rule = CutRule(num_q_heads, num_kv_heads, _TILE_ROWS[head_dim], num_sms)
        rows = MAX_ROWS * self._group, num_kv_heads
        self._q, self._out = (torch.empty(*rows, head_dim, dtype=dtype, device=device) for _ in range(2))
        self._log_sums = torch.empty(rows, device=device)
        self._beside = torch.cuda.Stream(device)
        table = np.zeros(MAX_TOKENS * ENTRY_SIZE, np.int32)
        # A cut prefix has two parts or more.
        max_pages = MAX_PARTS // 2 * num_pages
        num_bytes = Packed(table).num_bytes + max_pages * table.itemsize
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._table, self._pages = Packed(table, np.empty(0, np.int32)).views(self._memory)
        numbers = [torch.zeros(MAX_PARTS + n, dtype=torch.int32, device=device) for n in (1, 1, 0)]
        self._wrapper = Wrapper(
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                backend="fa3",
                use_cuda_graph=True,
                qo_indptr_buf=numbers[0],
                paged_kv_indptr_buf=numbers[1],
                paged_kv_indices_buf=self._pages,
                paged_kv_last_page_len_buf=numbers[2],
            )
        )
        self._num_rows = 0
        self._is_empty = False
        # FlashInfer takes the first plan's rows as the most.
        self.reserve()
        # Compile and load now: the first long prefix must not wait.
        q = self._q.new_zeros(1, num_q_heads, head_dim)
        log_sums = self._log_sums.new_zeros(q.shape[:2])
        copy_queries(q, self._table, self._q, num_kv_heads)
        self._wrapper.run_with_log_sums(self._q, kv, self._out, self._log_sums)
        merge_parts(q, log_sums, self._table, self._out, self._log_sums, num_kv_heads)

    def reserve(self) -> None:
        """Plans for the capture of a graph, whose kernel gets all rows."""
        self._is_empty = False
        self._plan([0, MAX_ROWS], [0, 0])

    def plan(self, parts: PrefixParts) -> None:
        # Most prefixes are whole, and a plan takes time.
        if parts.num_parts == 0 and self._is_empty:
            return
        self._is_empty = parts.num_parts == 0
        Packed(parts.table, np.array(parts.pages, np.int32)).copy_to(self._memory)
        self._plan(parts.rows, parts.first_pages)

    def attend(
        self,
        whole: Wrapper,
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """
        Args:
            whole: planned without the pages in parts.
            q: (num_tokens, num_q_heads, head_dim), with up to MAX_TOKENS tokens.
            kv: the layer's keys and values, (num_pages, page_size, num_kv_heads, head_dim) each.
        """
        heads = torch.empty_like(q) if out is None else out.view_as(q)
        log_sums = torch.empty(q.shape[:2], device=q.device)
        num_kv_heads = self._sizes[1]
        current = torch.cuda.current_stream(q.device)
        self._beside.wait_stream(current)
        with torch.cuda.stream(self._beside):
            copy_queries(q, self._table, self._q, num_kv_heads)
            # In a graph these are all rows, of which a plan takes some.
            rows = slice(self._num_rows)
            self._wrapper.run_with_log_sums(self._q[rows], kv, self._out[rows], self._log_sums[rows])
        whole.run_with_log_sums(q, kv, heads, log_sums)
        current.wait_stream(self._beside)
        merge_parts(heads, log_sums, self._table, self._out, self._log_sums, num_kv_heads)
        return heads.flatten(1)

    def _plan(self, rows: list[int], first_pages: list[int]) -> None:
        """Plans parts whose page ids are uploaded."""
        num_empty = MAX_PARTS + 1 - len(rows)
        page_size = self._sizes[3]
        self._num_rows = rows[-1] * self._group
        page_lens = [page_size if end > first else 0 for first, end in pairwise(first_pages)]
        self._wrapper.plan(
            pinned([row * self._group for row in (*rows, *[rows[-1]] * num_empty)]),
            pinned([*first_pages, *[first_pages[-1]] * num_empty]),
            # FlashInfer would copy them where they are.
            self._pages[:0],
            pinned([*page_lens, *[0] * num_empty]),
            *self._sizes,
            causal=False,
            q_data_type=self._q.dtype,
            kv_data_type=self._q.dtype,
            # FlashInfer would search for the longest, slowly.
            max_token_per_sequence=MAX_ROWS * self._group,
        )
