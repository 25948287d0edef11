"""Attention by FlashInfer's paged kernels. Needs CUDA."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import flashinfer
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
from tandem.engine.attention.page_tables import decode_slots, new_positions, page_tables, prefill_slots
from tandem.engine.attention.paged_decode import PagedDecode, PlannedPagedDecode, graphed_paged_decodes, has_kernel
from tandem.engine.attention.scales import KvScales
from tandem.engine.batch import Batch
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.cuda_pool import CudaKvPool
from tandem.engine.layers.cuda_kernel import has_dependent_launch
from tandem.engine.layers.norm import QkNorm
from tandem.engine.layers.rotary import Rotation
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import Packed, to_device

WORKSPACE_BYTES = 256 * 2**20
# As large as FlashInfer's own.
PLAN_BYTES = 8 * 2**20
DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)
# Hopper's own prefill kernels (fa3).
FA3_CAPABILITY = 9
# FlashInfer's kernel has plans that need less memory.
MAX_OWN_DECODE = 512
# Prompt tokens of a mixed graph whose attention runs beside that of decoded sequences. More take most multiprocessors.
MAX_BESIDE = 256


class FlashInferAttention(GraphableHeadBackend):
    """Plans from host tensors, because device tensors would be copied back synchronously.

    FlashInfer's kernel of several queries a sequence plans on the host for longer, which would be idle time of the
    device: steps with drafts follow known tokens. So these run Tandem's own kernel.
    """

    reads_quantized = True
    computes_mixed = True
    computes_drafts = True

    @classmethod
    def why_not(cls, layout: PageLayout, num_q_heads: int, device: torch.device) -> str:
        if not isinstance(layout, KvHeadLayout):
            return super().why_not(layout, num_q_heads, device)
        if device.type != "cuda":
            return f"FlashInfer runs on GPUs, not on {device.type}"
        if layout.dtype not in DTYPES:
            return f"FlashInfer computes {' and '.join(DTYPES)}, not {layout.dtype}"
        if layout.head_dim not in HEAD_DIMS:
            return f"FlashInfer computes heads of {', '.join(map(str, HEAD_DIMS))}, not {layout.head_dim}"
        return why_not_written(layout, device)

    def __init__(self, pool: CudaKvPool, num_q_heads: int, kv_scales: KvScales | None = None) -> None:
        layout = pool.layout
        assert isinstance(layout, KvHeadLayout)
        self._device = pool.device
        self._num_columns = num_q_heads * layout.head_dim
        # Shared by all wrappers, because one runs at a time. FlashInfer requires zeros.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        scales = kv_scales or KvScales.ones(layout.num_layers)
        self._paged = _PagedKernels(pool, layout, num_q_heads, scales)
        major, _ = torch.cuda.get_device_capability(self._device)
        self._own_decode: PagedDecode | None = None
        if has_dependent_launch(self._device) and has_kernel(layout, num_q_heads):
            self._own_decode = PagedDecode(pool, num_q_heads, MAX_OWN_DECODE, scales)
        prefill_backend = "fa3" if major == FA3_CAPABILITY else "fa2"
        self._paged_backend = "fa2" if layout.quantized_to else prefill_backend
        # Graphs of other kernels need a workspace that grows with the size.
        self.graphs_new_prompts = self._paged_backend == "fa3"
        self._prefill = _Wrapper(
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=self._paged_backend)
        )
        self._first_prefill = _Wrapper(
            flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self._workspace, "NHD", backend=prefill_backend),
            reads_pages=False,
        )
        # Grouped queries fill a tensor core's rows.
        self._decode = _Wrapper(
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", use_tensor_cores=True)
        )
        self._drafts = DraftAttention(pool, num_q_heads, scales)
        # Of prompts in mixed graphs.
        self._beside = torch.cuda.Stream(self._device)
        self._planned: HeadAttention | None = None

    def plan(self, batch: Batch) -> None:
        self._planned = plan_by_kind(batch, self._plan_decode, self._plan_prefill, self._num_columns, self._device)

    def attend(self, qkv: torch.Tensor, rotation: Rotation, qk_norm: QkNorm | None, layer: int) -> torch.Tensor:
        assert self._planned is not None
        return self._planned.attend(qkv, rotation, qk_norm, layer)

    def _plan_decode(self, sequences: Sequence[TokenSequence]) -> PlannedAttention:
        if any(s.draft_ids for s in sequences):
            return self._drafts.plan(sequences)
        if self._own_decode is not None and len(sequences) <= MAX_OWN_DECODE:
            (plan,) = self._own_decode.plan(sequences, len(sequences)).to(self._device)
            return PlannedPagedDecode(self._own_decode, plan)
        slots = to_device(decode_slots(self._paged.layout, sequences), self._device)
        self._decode.plan(*self._paged.tables(sequences), *self._paged.sizes, **self._paged.dtypes)
        return _Planned(self._paged, self._decode, slots)

    def _plan_prefill(self, sequences: Sequence[TokenSequence]) -> PlannedAttention:
        sizes, dtypes = self._paged.sizes, self._paged.dtypes
        slots = to_device(prefill_slots(self._paged.layout, sequences), self._device)
        indptr = _pinned([0, *accumulate(s.extend_len for s in sequences)])
        if any(s.cached_len for s in sequences):
            self._prefill.plan(indptr, *self._paged.tables(sequences), *sizes, causal=True, **dtypes)
            return _Planned(self._paged, self._prefill, slots)
        dtypes = dtypes | {"kv_data_type": dtypes["q_data_type"]}
        self._first_prefill.plan(indptr, indptr, *sizes[:3], causal=True, **dtypes)
        return _Planned(self._paged, self._first_prefill, slots)

    def for_graphs(self, batch_sizes: Sequence[int], max_pages_per_sequence: int) -> dict[int, GraphedHeadAttention]:
        graphed: dict[int, GraphedHeadAttention] = {}
        own_sizes = [size for size in batch_sizes if size <= MAX_OWN_DECODE]
        if self._own_decode is not None and own_sizes:
            graphed = graphed_paged_decodes(self._own_decode, own_sizes, max_pages_per_sequence)
        other_sizes = [size for size in batch_sizes if size not in graphed]
        num_pages = max(other_sizes, default=0) * max_pages_per_sequence
        indices = torch.zeros(num_pages, dtype=torch.int32, device=self._device)
        return graphed | {size: _GraphedDecode(self._paged, self._workspace, size, indices) for size in other_sizes}

    def for_prefill_graphs(
        self, sizes: Sequence[int], max_sequences: int, max_pages_per_sequence: int
    ) -> dict[int, GraphedHeadAttention]:
        # Sizes share page tables and plans.
        num_padding_pages = self._paged.layout.num_pages_for(max(sizes, default=0))
        num_pages = max_sequences * max_pages_per_sequence + num_padding_pages
        indices = torch.zeros(num_pages, dtype=torch.int32, device=self._device)
        plans = torch.zeros(PLAN_BYTES, dtype=torch.uint8, device=self._device)
        return {
            size: _GraphedPrefill(
                self._paged, self._workspace, plans, size, max_sequences + 1, indices, self._paged_backend
            )
            for size in sizes
        }

    def for_new_prompt_graphs(self, sizes: Sequence[int], max_sequences: int) -> dict[int, GraphedHeadAttention]:
        plans = torch.zeros(PLAN_BYTES, dtype=torch.uint8, device=self._device)
        return {
            size: _GraphedNewPrompts(self._paged, self._workspace, plans, size, max_sequences + 1, self._paged_backend)
            for size in sizes
        }

    def for_draft_graphs(self, sizes: Sequence[int], max_pages_per_sequence: int) -> dict[int, GraphedHeadAttention]:
        return self._drafts.graphed(sizes, max_pages_per_sequence)

    def joined(self, decode: GraphedAttention, prefill: GraphedAttention) -> HeadAttention:
        # FlashInfer's decode kernel shares its prefill kernel's workspace.
        is_beside = not isinstance(decode, _GraphedDecode) and len(prefill.positions) <= MAX_BESIDE
        return graphed_by_kind(decode, prefill, self._num_columns, self._beside if is_beside else None)


class _Wrapper:
    """The next plan waits for the copy of the previous one from pinned memory.

    Attributes:
        reads_pages: True if keys and values are read from pages. Otherwise they are read from qkv, in larger pieces,
            and all tokens of every sequence must be new.
    """

    def __init__(self, wrapper: Any, *, reads_pages: bool = True) -> None:
        self.reads_pages = reads_pages
        self._wrapper = wrapper
        self._copied = torch.cuda.Event()

    def plan(self, *tables: Any, **options: Any) -> None:
        self._copied.synchronize()
        self._wrapper.plan(*tables, **options)
        self._copied.record()

    def run(self, q: torch.Tensor, *kv: Any, out: torch.Tensor | None, **scales: float) -> torch.Tensor:
        # Without `out` the wrapper would zero its output first.
        heads = torch.empty_like(q) if out is None else out.view_as(q)
        attended: torch.Tensor = self._wrapper.run(q, *kv, out=heads, **scales)
        return attended.flatten(1)


class _PagedKernels:
    """
    Attributes:
        sizes: head counts, head_dim and page_size, in plan order.
        dummy_page: the page after the pool's last.
    """

    def __init__(self, pool: CudaKvPool, layout: KvHeadLayout, num_q_heads: int, kv_scales: KvScales) -> None:
        self.layout = layout
        self._scales = kv_scales
        self._written_scales = kv_scales if layout.quantized_to else None
        dtype, page_dtype = (getattr(torch, name) for name in (layout.dtype, layout.page_dtype))
        self.sizes = num_q_heads, layout.num_kv_heads, layout.head_dim, layout.page_size
        self.dtypes: dict[str, torch.dtype] = {"q_data_type": dtype, "kv_data_type": page_dtype}
        self.dummy_page = pool.num_pages
        self._num_q_heads = num_q_heads
        kv = self._pool = layout.view(pool.memory_and_dummy)
        # (num_pages + 1, page_size, num_kv_heads, head_dim) each.
        self._caches = [(kv[:, layer, 0], kv[:, layer, 1]) for layer in range(layout.num_layers)]

    def tables(
        self, sequences: Sequence[TokenSequence], num_padding: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns int32 indptr (num_rows + 1,) pinned, indices (num_pages,) on the device, last_page_lens (num_rows,)
        pinned. Padding rows are one token on the dummy page."""
        indices, indptr = page_tables(self.layout, sequences)
        indptr += range(len(indices), len(indices) + num_padding + 1)
        indices.extend([self.dummy_page] * num_padding)
        page_size = self.layout.page_size
        last_page_lens = [(s.device_len - 1) % page_size + 1 for s in sequences] + [1] * num_padding
        # For a graph, plan would copy host memory synchronously.
        on_device = to_device(np.array(indices, np.int32), self._pool.device)
        return _pinned(indptr), on_device, _pinned(last_page_lens)

    def attend(
        self,
        wrapper: _Wrapper,
        slots: torch.Tensor,
        qkv: torch.Tensor,
        rotation: Rotation,
        qk_norm: QkNorm | None,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As PlannedAttention.attend. Args: slots: (num_tokens,) int64."""
        q = norm_rotate_write(
            qkv,
            self._num_q_heads,
            rotation,
            qk_norm,
            self._pool,
            layer,
            slots,
            kv_scales=self._written_scales,
            keep_kv=not wrapper.reads_pages,
        )
        if wrapper.reads_pages:
            # k_scale joins the score scale; a v_scale of 1.0 costs nothing.
            scales = {"k_scale": self._scales.keys[layer], "v_scale": self._scales.values[layer]}
            return wrapper.run(q, self._caches[layer], out=out, **scales)
        num_kv_heads = self.layout.num_kv_heads
        _, k, v = qkv.split((self._num_q_heads, num_kv_heads, num_kv_heads), dim=1)
        return wrapper.run(q, k, v, out=out)


class _Planned(PlannedAttention):
    def __init__(self, paged: _PagedKernels, wrapper: _Wrapper, slots: torch.Tensor) -> None:
        self._paged = paged
        self._wrapper = wrapper
        self._slots = slots

    def attend(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        qk_norm: QkNorm | None,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._paged.attend(self._wrapper, self._slots, qkv, rotation, qk_norm, layer, out)


class _GraphedDecode(GraphedHeadAttention):
    def __init__(self, paged: _PagedKernels, workspace: torch.Tensor, batch_size: int, indices: torch.Tensor) -> None:
        self._paged = paged
        self._batch_size = batch_size
        device = workspace.device
        packed = self._pack(())
        self._memory = torch.zeros(packed.num_bytes, dtype=torch.uint8, device=device)
        self._slots, positions = packed.views(self._memory)
        self.positions = positions[:batch_size]
        self._wrapper = _Wrapper(
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

    def attend(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        qk_norm: QkNorm | None,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._paged.attend(self._wrapper, self._slots, qkv, rotation, qk_norm, layer, out)

    def _pack(self, sequences: Sequence[TokenSequence]) -> Packed:
        num_padding = self._batch_size - len(sequences)
        slots = decode_slots(self._paged.layout, sequences, num_padding, self._paged.dummy_page)
        return Packed(slots, np.array([s.cached_len for s in sequences] + [0] * num_padding, np.int32))


class _GraphedPrompts(GraphedHeadAttention):
    """Padding is one more sequence of dummy pages; the remaining sequences are empty."""

    _wrapper: _Wrapper

    def __init__(self, paged: _PagedKernels, num_tokens: int, num_sequences: int, device: torch.device) -> None:
        """Args: num_sequences: including padding."""
        self._paged = paged
        self._num_tokens = num_tokens
        self._num_sequences = num_sequences
        packed = self._pack(())
        self._memory = torch.zeros(packed.num_bytes, dtype=torch.uint8, device=device)
        self._slots, positions = packed.views(self._memory)
        self.positions = positions[:num_tokens]

    def attend(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        qk_norm: QkNorm | None,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._paged.attend(self._wrapper, self._slots, qkv, rotation, qk_norm, layer, out)

    def _new_indptr(self, sequences: Sequence[TokenSequence]) -> tuple[torch.Tensor, int]:
        """Returns the first new token of each sequence, (num_sequences + 1,) int32 pinned, and the number of padding
        tokens."""
        ends = [*accumulate(s.extend_len for s in sequences)]
        num_padding = self._num_tokens - (ends[-1] if ends else 0)
        return _pinned([0, *ends, *[self._num_tokens] * (self._num_sequences - len(ends))]), num_padding

    def _pack(self, sequences: Sequence[TokenSequence]) -> Packed:
        layout = self._paged.layout
        slots = np.full(self._num_tokens, self._paged.dummy_page * layout.page_size, np.int64)
        positions = np.zeros(self._num_tokens, np.int32)
        if sequences:
            new = prefill_slots(layout, sequences)
            slots[: len(new)] = new
            positions[: len(new)] = new_positions(sequences)
        return Packed(slots, positions)


class _GraphedPrefill(_GraphedPrompts):
    def __init__(
        self,
        paged: _PagedKernels,
        workspace: torch.Tensor,
        plans: torch.Tensor,
        num_tokens: int,
        num_sequences: int,
        indices: torch.Tensor,
        backend: str,
    ) -> None:
        """Args: plans: (PLAN_BYTES,) uint8 on the device; num_sequences: including padding."""
        super().__init__(paged, num_tokens, num_sequences, workspace.device)
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
        self._wrapper = _Wrapper(wrapper)

    def plan(self, sequences: Sequence[TokenSequence]) -> None:
        self._pack(sequences).copy_to(self._memory)
        page_size = self._paged.layout.page_size
        new_indptr, num_padding = self._new_indptr(sequences)
        indices, indptr = page_tables(self._paged.layout, sequences)
        last_page_lens = [(s.device_len - 1) % page_size + 1 for s in sequences]
        indptr.append(len(indices))
        indices.extend([self._paged.dummy_page] * -(-num_padding // page_size))
        last_page_lens.append((num_padding - 1) % page_size + 1 if num_padding else 0)
        num_empty = self._num_sequences - len(last_page_lens)
        self._wrapper.plan(
            new_indptr,
            _pinned([*indptr, *[len(indices)] * (num_empty + 1)]),
            to_device(np.array(indices, np.int32), self._memory.device),
            _pinned([*last_page_lens, *[0] * num_empty]),
            *self._paged.sizes,
            causal=True,
            **self._paged.dtypes,
        )


class _GraphedNewPrompts(_GraphedPrompts):
    """Reads keys and values where they were projected."""

    def __init__(
        self,
        paged: _PagedKernels,
        workspace: torch.Tensor,
        plans: torch.Tensor,
        num_tokens: int,
        num_sequences: int,
        backend: str,
    ) -> None:
        """Args: as of _GraphedPrefill."""
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
        self._wrapper = _Wrapper(wrapper, reads_pages=False)

    def plan(self, sequences: Sequence[TokenSequence]) -> None:
        self._pack(sequences).copy_to(self._memory)
        indptr, _ = self._new_indptr(sequences)
        self._wrapper.plan(indptr, indptr, *self._paged.sizes[:3], causal=True, **self._paged.dtypes)


def _numbers(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def _pinned(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, pin_memory=True)
