"""Attention by FlashInfer's paged kernels. Needs CUDA."""

from collections.abc import Sequence
from itertools import accumulate

import flashinfer
import torch

from tandem.engine.attention.base import (
    GraphableHeadBackend,
    GraphedAttention,
    GraphedHeadAttention,
    HeadAttention,
    PlannedAttention,
)
from tandem.engine.attention.draft_attention import DraftAttention
from tandem.engine.attention.flashinfer_graphs import GraphedDecode, GraphedNewPrompts, GraphedPrefill
from tandem.engine.attention.flashinfer_kernels import PagedKernels, PlannedKernels
from tandem.engine.attention.flashinfer_parts import PartAttention
from tandem.engine.attention.flashinfer_wrapper import Wrapper, pinned
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.mixed import graphed_by_kind, plan_by_kind
from tandem.engine.attention.norm_rotate_write import why_not_written
from tandem.engine.attention.page_tables import decode_slots, prefill_slots
from tandem.engine.attention.paged_decode import PagedDecode, PlannedPagedDecode, graphed_paged_decodes, has_kernel
from tandem.engine.attention.prefix_parts import MAX_TOKENS, PrefixParts, cut_prefixes
from tandem.engine.attention.scales import KvScales
from tandem.engine.batch import Batch
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.cuda_pool import CudaKvPool
from tandem.engine.layers.cuda_kernel import has_dependent_launch
from tandem.engine.layers.norm import QkNorm
from tandem.engine.layers.rotary import Rotation
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import to_device

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
        # Shared by all wrappers: those that write into it run one at a time, Hopper's prefill does not. FlashInfer
        # requires zeros.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        scales = kv_scales or KvScales.ones(layout.num_layers)
        self._paged = PagedKernels(pool, layout, num_q_heads, scales)
        major, _ = torch.cuda.get_device_capability(self._device)
        self._own_decode: PagedDecode | None = None
        if has_dependent_launch(self._device) and has_kernel(layout, num_q_heads):
            self._own_decode = PagedDecode(pool, num_q_heads, MAX_OWN_DECODE, scales)
        prefill_backend = "fa3" if major == FA3_CAPABILITY else "fa2"
        self._paged_backend = "fa2" if layout.quantized_to else prefill_backend
        # Graphs of other kernels need a workspace that grows with the size.
        self.graphs_new_prompts = self._paged_backend == "fa3"
        self._prefill = Wrapper(
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=self._paged_backend)
        )
        self._parts: PartAttention | None = None
        self._first_prefill = Wrapper(
            flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self._workspace, "NHD", backend=prefill_backend),
            reads_pages=False,
        )
        # Grouped queries fill a tensor core's rows.
        self._decode = Wrapper(
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
        return PlannedKernels(self._paged, self._decode, slots)

    def _plan_prefill(self, sequences: Sequence[TokenSequence]) -> PlannedAttention:
        sizes, dtypes = self._paged.sizes, self._paged.dtypes
        slots = to_device(prefill_slots(self._paged.layout, sequences), self._device)
        indptr = pinned([0, *accumulate(s.extend_len for s in sequences)])
        if any(s.cached_len for s in sequences):
            parts = self._plan_parts(sequences)
            tables = self._paged.tables(sequences, num_cut_pages=None if parts is None else parts.num_cut_pages)
            self._prefill.plan(indptr, *tables, *sizes, causal=True, **dtypes)
            return PlannedKernels(self._paged, self._prefill, slots, None if parts is None else self._parts)
        dtypes = dtypes | {"kv_data_type": dtypes["q_data_type"]}
        self._first_prefill.plan(indptr, indptr, *sizes[:3], causal=True, **dtypes)
        return PlannedKernels(self._paged, self._first_prefill, slots)

    def _plan_parts(self, sequences: Sequence[TokenSequence]) -> PrefixParts | None:
        """Returns None if all prefixes stay whole."""
        num_tokens = sum(s.extend_len for s in sequences)
        attention = self._part_attention(num_tokens)
        if attention is None:
            return None
        parts = cut_prefixes(attention.rule, self._paged.layout, sequences, num_tokens)
        if parts.num_parts == 0:
            return None
        attention.plan(parts)
        return parts

    def _part_attention(self, num_tokens: int) -> PartAttention | None:
        """Returns None if no forward pass of `num_tokens` has parts. Made when first needed: decode steps need none."""
        # The other kernels share prefixes among multiprocessors themselves.
        if self._paged_backend != "fa3" or num_tokens > MAX_TOKENS:
            return None
        if self._parts is None:
            # Its memory is planned in forward passes and outside of them.
            with torch.inference_mode(False):
                self._parts = PartAttention(self._paged.sizes[0], self._paged.caches[0], self._workspace)
        return self._parts

    def for_graphs(self, batch_sizes: Sequence[int], max_pages_per_sequence: int) -> dict[int, GraphedHeadAttention]:
        graphed: dict[int, GraphedHeadAttention] = {}
        own_sizes = [size for size in batch_sizes if size <= MAX_OWN_DECODE]
        if self._own_decode is not None and own_sizes:
            graphed = graphed_paged_decodes(self._own_decode, own_sizes, max_pages_per_sequence)
        other_sizes = [size for size in batch_sizes if size not in graphed]
        num_pages = max(other_sizes, default=0) * max_pages_per_sequence
        indices = torch.zeros(num_pages, dtype=torch.int32, device=self._device)
        return graphed | {size: GraphedDecode(self._paged, self._workspace, size, indices) for size in other_sizes}

    def for_prefill_graphs(
        self, sizes: Sequence[int], max_sequences: int, max_pages_per_sequence: int
    ) -> dict[int, GraphedHeadAttention]:
        # Sizes share page tables and plans.
        num_padding_pages = self._paged.layout.num_pages_for(max(sizes, default=0))
        num_pages = max_sequences * max_pages_per_sequence + num_padding_pages
        indices = torch.zeros(num_pages, dtype=torch.int32, device=self._device)
        plans = torch.zeros(PLAN_BYTES, dtype=torch.uint8, device=self._device)
        return {
            size: GraphedPrefill(
                self._paged,
                self._workspace,
                plans,
                size,
                max_sequences + 1,
                indices,
                self._paged_backend,
                self._part_attention(size),
            )
            for size in sizes
        }

    def for_new_prompt_graphs(self, sizes: Sequence[int], max_sequences: int) -> dict[int, GraphedHeadAttention]:
        plans = torch.zeros(PLAN_BYTES, dtype=torch.uint8, device=self._device)
        return {
            size: GraphedNewPrompts(self._paged, self._workspace, plans, size, max_sequences + 1, self._paged_backend)
            for size in sizes
        }

    def for_draft_graphs(self, sizes: Sequence[int], max_pages_per_sequence: int) -> dict[int, GraphedHeadAttention]:
        return self._drafts.graphed(sizes, max_pages_per_sequence)

    def joined(self, decode: GraphedAttention, prefill: GraphedAttention) -> HeadAttention:
        # FlashInfer's decode kernel shares its prefill kernel's workspace.
        is_beside = not isinstance(decode, GraphedDecode) and len(prefill.positions) <= MAX_BESIDE
        return graphed_by_kind(decode, prefill, self._num_columns, self._beside if is_beside else None)
