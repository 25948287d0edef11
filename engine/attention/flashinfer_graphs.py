"""FlashInfer's kernels in CUDA graphs: plans and tables in fixed buffers. Needs CUDA."""

from collections.abc import Sequence
from itertools import accumulate

import flashinfer
import numpy as np
import torch

from tandem.engine.attention.base import GraphedHeadAttention
from tandem.engine.attention.flashinfer_kernels import OverPages, PagedKernels
from tandem.engine.attention.flashinfer_parts import PartAttention
from tandem.engine.attention.flashinfer_wrapper import Wrapper, pinned
from tandem.engine.attention.page_tables import decode_slots, new_positions, page_tables, prefill_slots
from tandem.engine.attention.prefix_parts import cut_prefixes
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import Packed, to_device


class GraphedDecode(OverPages, GraphedHeadAttention):
    def __init__(self, paged: PagedKernels, workspace: torch.Tensor, batch_size: int, indices: torch.Tensor) -> None:
        self._paged = paged
        self._batch_size = batch_size
        device = workspace.device
        packed = self._pack(())
        self._memory = torch.zeros(packed.num_bytes, dtype=torch.uint8, device=device)
        self._slots, positions = packed.views(self._memory)
        self.positions = positions[:batch_size]
        self._wrapper = Wrapper(
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=torch.zeros(batch_size + 1, dtype=torch.int32, device=device),
                paged_kv_indices_buffer=indices,
                paged_kv_last_page_len_buffer=torch.ones(batch_size, dtype=torch.int32, device=device),
            )
        )

    def plan(self, sequences: Sequence[TokenSequence]) -> None:
        self._pack(sequences).copy_to(self._memory)
        tables = self._paged.tables(sequences, self._batch_size - len(sequences))
        self._wrapper.plan(*tables, *self._paged.sizes, **self._paged.dtypes)

    def _pack(self, sequences: Sequence[TokenSequence]) -> Packed:
        num_padding = self._batch_size - len(sequences)
        slots = decode_slots(self._paged.layout, sequences, num_padding, self._paged.dummy_page)
        return Packed(slots, np.array([s.cached_len for s in sequences] + [0] * num_padding, np.int32))


class _GraphedPrompts(OverPages, GraphedHeadAttention):
    """Padding is one more sequence of dummy pages; the remaining sequences are empty."""

    def __init__(self, paged: PagedKernels, num_tokens: int, num_sequences: int, device: torch.device) -> None:
        """Args: num_sequences: including padding."""
        self._paged = paged
        self._num_tokens = num_tokens
        self._num_sequences = num_sequences
        packed = self._pack(())
        self._memory = torch.zeros(packed.num_bytes, dtype=torch.uint8, device=device)
        self._slots, positions = packed.views(self._memory)
        self.positions = positions[:num_tokens]

    def _new_indptr(self, sequences: Sequence[TokenSequence]) -> tuple[torch.Tensor, int]:
        """Returns the first new token of each sequence, (num_sequences + 1,) int32 pinned, and the number of padding
        tokens."""
        ends = [*accumulate(s.extend_len for s in sequences)]
        num_padding = self._num_tokens - (ends[-1] if ends else 0)
        return pinned([0, *ends, *[self._num_tokens] * (self._num_sequences - len(ends))]), num_padding

    def _pack(self, sequences: Sequence[TokenSequence]) -> Packed:
        layout = self._paged.layout
        slots = np.full(self._num_tokens, self._paged.dummy_page * layout.page_size, np.int64)
        positions = np.zeros(self._num_tokens, np.int32)
        if sequences:
            new = prefill_slots(layout, sequences)
            slots[: len(new)] = new
            positions[: len(new)] = new_positions(sequences)
        return Packed(slots, positions)


class GraphedPrefill(_GraphedPrompts):
    def __init__(
        self,
        paged: PagedKernels,
        workspace: torch.Tensor,
        plans: torch.Tensor,
        num_tokens: int,
        num_sequences: int,
        indices: torch.Tensor,
        backend: str,
        parts: PartAttention | None = None,
    ) -> None:
        """
        Args:
            plans: (PLAN_BYTES,) uint8 on the device.
            num_sequences: including padding.
            parts: None: all prefixes stay whole.
        """
        super().__init__(paged, num_tokens, num_sequences, workspace.device)
        self._parts = parts
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=_numbers(num_sequences + 1, workspace.device),
            paged_kv_indptr_buf=_numbers(num_sequences + 1, workspace.device),
            paged_kv_indices_buf=indices,
            paged_kv_last_page_len_buf=_numbers(num_sequences, workspace.device),
            backend=backend,
        )
        wrapper.reset_workspace_buffer(workspace, plans)
        self._wrapper = Wrapper(wrapper)

    def plan(self, sequences: Sequence[TokenSequence]) -> None:
        self._pack(sequences).copy_to(self._memory)
        page_size = self._paged.layout.page_size
        new_indptr, num_padding = self._new_indptr(sequences)
        indices, indptr = page_tables(self._paged.layout, sequences, self._cut(sequences))
        last_page_lens = [(s.device_len - 1) % page_size + 1 for s in sequences]
        indptr.append(len(indices))
        indices.extend([self._paged.dummy_page] * -(-num_padding // page_size))
        last_page_lens.append((num_padding - 1) % page_size + 1 if num_padding else 0)
        num_empty = self._num_sequences - len(last_page_lens)
        self._wrapper.plan(
            new_indptr,
            pinned([*indptr, *[len(indices)] * (num_empty + 1)]),
            to_device(np.array(indices, np.int32), self._memory.device),
            pinned([*last_page_lens, *[0] * num_empty]),
            *self._paged.sizes,
            causal=True,
            # FlashInfer would search for the longest, slowly.
            max_token_per_sequence=self._num_tokens,
            **self._paged.dtypes,
        )

    def _cut(self, sequences: Sequence[TokenSequence]) -> list[int] | None:
        """Plans the parts. Returns the leading pages of each sequence that are in parts."""
        if self._parts is None:
            return None
        if not sequences:
            self._parts.reserve()
            return []
        parts = cut_prefixes(self._parts.rule, self._paged.layout, sequences, self._num_tokens)
        self._parts.plan(parts)
        return parts.num_cut_pages


class GraphedNewPrompts(_GraphedPrompts):
    """Reads keys and values where they were projected."""

    def __init__(
        self,
        paged: PagedKernels,
        workspace: torch.Tensor,
        plans: torch.Tensor,
        num_tokens: int,
        num_sequences: int,
        backend: str,
    ) -> None:
        """Args: as of GraphedPrefill."""
        super().__init__(paged, num_tokens, num_sequences, workspace.device)
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=_numbers(num_sequences + 1, workspace.device),
            kv_indptr_buf=_numbers(num_sequences + 1, workspace.device),
            backend=backend,
        )
        wrapper.reset_workspace_buffer(workspace, plans)
        self._wrapper = Wrapper(wrapper, reads_pages=False)

    def plan(self, sequences: Sequence[TokenSequence]) -> None:
        self._pack(sequences).copy_to(self._memory)
        indptr, _ = self._new_indptr(sequences)
        self._wrapper.plan(indptr, indptr, *self._paged.sizes[:3], causal=True, **self._paged.dtypes)


def _numbers(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)
