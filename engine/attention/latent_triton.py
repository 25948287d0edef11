"""Attention over latents by Tandem's Triton kernels. Needs CUDA."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch

from tandem.engine.attention.base import (
    Attention,
    GraphableBackend,
    GraphedAttention,
    LatentAttention,
    LatentBackend,
    LatentHeads,
)
from tandem.engine.attention.latent_expansion import LatentExpansion
from tandem.engine.attention.latent_layout import LatentLayout
from tandem.engine.attention.latent_plan import LatentPlans, decode_plans, prompt_plans
from tandem.engine.attention.latent_planned import (
    AbsorbedLatents,
    ExpandedLatents,
    JoinedLatents,
    LatentKernels,
    LatentTables,
    Parts,
    PlannedLatents,
    places,
)
from tandem.engine.attention.scales import KvScales
from tandem.engine.batch import Batch
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.cuda_pool import CudaKvPool
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.rotary import Rotation
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import Packed, aligned

DTYPES = ("bfloat16", "float16")
CAPABILITY = 9
# Blocks have shared memory for the queries and two blocks of latents of these sizes, 225 KiB.
KV_RANKS, ROPE_DIMS = (64, 128, 256, 512), (16, 32, 64)


class LatentTritonAttention(LatentBackend, GraphableBackend):
    """Decode steps, and prompts of few new tokens, have absorbed queries. Prompts of many are expanded.

    Attributes:
        expansion: computes prompts of many new tokens.
    """

    reads_quantized = True
    computes_mixed = True
    computes_drafts = True

    @classmethod
    def why_not(cls, layout: PageLayout, num_q_heads: int, device: torch.device) -> str:
        if not isinstance(layout, LatentLayout):
            return super().why_not(layout, num_q_heads, device)
        if device.type != "cuda":
            return f"the Triton kernels of latents run on GPUs, not on {device.type}"
        if layout.dtype not in DTYPES:
            return f"the Triton kernels of latents compute {' and '.join(DTYPES)}, not {layout.dtype}"
        for name, size, sizes in (
            ("kv_lora_rank", layout.kv_rank, KV_RANKS),
            ("qk_rope_head_dim", layout.rope_dim, ROPE_DIMS),
        ):
            if size not in sizes:
                return f"the Triton kernels of latents compute {name} {', '.join(map(str, sizes))}, not {size}"
        major, minor = torch.cuda.get_device_capability(device)
        if major != CAPABILITY:
            return f"the Triton kernels of latents need a GPU of compute capability {CAPABILITY}, not {major}.{minor}"
        return ""

    def __init__(self, pool: CudaKvPool, num_q_heads: int, kv_scales: KvScales | None = None) -> None:
        layout = pool.layout
        assert isinstance(layout, LatentLayout)
        self._layout = layout
        self._device = pool.device
        pages, scales = layout.views(pool.memory_and_dummy), kv_scales or KvScales.ones(layout.num_layers)
        self._kernels = LatentKernels(layout, pages, scales)
        self._dummy_page = pool.num_pages
        self._num_heads = num_q_heads
        self._num_programs = torch.cuda.get_device_properties(self._device).multi_processor_count
        self.expansion = LatentExpansion(layout, pages, num_q_heads, scales)
        self._planned: LatentAttention | None = None

    def plan(self, batch: Batch) -> None:
        parts: list[PlannedLatents] = []
        if batch.decoded:
            # Drafts share reads of latents in tiles, as prompts do.
            num_rows = batch.num_decoded_tokens
            plans = self._prompt_plans(num_rows) if batch.num_drafts else self._decode_plans(num_rows)
            parts.append(self._plan_absorbed(batch.decoded, plans))
        plans = self._prompt_plans(sum(s.extend_len for s in batch.prompts))
        for is_expanded, prompts in groupby(batch.prompts, self.expansion.is_faster):
            if not is_expanded:
                parts.append(self._plan_absorbed(list(prompts), plans))
                continue
            parts += (ExpandedLatents(self._kernels, self.expansion, prompt) for prompt in prompts)
        self._planned = parts[0] if len(parts) == 1 else JoinedLatents(parts)

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, norm: Norm, rotation: Rotation, heads: LatentHeads, layer: int
    ) -> torch.Tensor:
        assert self._planned is not None
        return self._planned.attend(q, kv, norm, rotation, heads, layer)

    def _plan_absorbed(self, sequences: Sequence[TokenSequence], plans: LatentPlans) -> "PlannedLatents":
        plan = plans.build(self._layout, sequences)
        packed = Packed(*places(self._layout, sequences), *plan.arrays)
        parts = self._kernels.parts(plan.num_parts, plans)
        return AbsorbedLatents(self._kernels, LatentTables(*packed.to(self._device)), parts, self._num_programs)

    def _decode_plans(self, num_tokens: int) -> LatentPlans:
        return decode_plans(num_tokens, self._num_heads, self._num_programs)

    def _prompt_plans(self, num_tokens: int) -> LatentPlans:
        return prompt_plans(num_tokens, self._num_heads, self._num_programs)

    def for_graphs(self, batch_sizes: Sequence[int], max_pages_per_sequence: int) -> dict[int, GraphedAttention]:
        plans = {size: self._decode_plans(size) for size in batch_sizes}
        return self._graphed(plans, {size: size for size in batch_sizes}, max_pages_per_sequence)

    def for_draft_graphs(self, sizes: Sequence[int], max_pages_per_sequence: int) -> dict[int, GraphedAttention]:
        plans = {size: self._prompt_plans(size) for size in sizes}
        # Each token may be of another sequence, and padding is one more.
        return self._graphed(plans, {size: size + 1 for size in sizes}, max_pages_per_sequence)

    def for_prefill_graphs(
        self, sizes: Sequence[int], max_sequences: int, max_pages_per_sequence: int
    ) -> dict[int, GraphedAttention]:
        plans = {size: self._prompt_plans(size) for size in sizes}
        # Padding is one more sequence.
        return self._graphed(plans, dict.fromkeys(sizes, max_sequences + 1), max_pages_per_sequence)

    def joined(self, decode: GraphedAttention, prefill: GraphedAttention) -> Attention:
        assert isinstance(decode, _Graphed) and isinstance(prefill, _Graphed)
        return JoinedLatents([decode, prefill])

    def _graphed(
        self, plans: dict[int, LatentPlans], num_sequences: dict[int, int], max_pages_per_sequence: int
    ) -> dict[int, GraphedAttention]:
        """Sizes share memory. Args: plans, num_sequences: by number of tokens."""
        if not plans:
            return {}
        packers = {
            size: _Packer(self._layout, of_size, size, num_sequences[size], self._dummy_page)
            for size, of_size in plans.items()
        }
        num_bytes = max(packer.pack(()).num_bytes for packer in packers.values())
        num_bytes += aligned(4 * max(num_sequences.values()) * max_pages_per_sequence)
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        most = max(of_size.max_parts(num_sequences[size]) for size, of_size in plans.items())
        parts = self._kernels.parts(most, next(iter(plans.values())))
        return {
            size: _Graphed(
                self._kernels,
                packer,
                memory,
                parts._replace(most_of_tile=plans[size].most_parts),
                self._num_programs,
            )
            for size, packer in packers.items()
        }


class _Packer:
    """Packs plans of one size of graph."""

    def __init__(
        self, layout: LatentLayout, plans: LatentPlans, num_tokens: int, num_sequences: int, dummy_page: int
    ) -> None:
        self._layout = layout
        self._plans = plans
        self._num_tokens = num_tokens
        self._num_sequences = num_sequences
        self._dummy_page = dummy_page

    def pack(self, sequences: Sequence[TokenSequence]) -> Packed:
        slots = np.full(self._num_tokens, self._dummy_page * self._layout.page_size, np.int64)
        positions = np.zeros(self._num_tokens, np.int32)
        num_padding = self._num_tokens
        if sequences:
            of_places = places(self._layout, sequences)
            num_tokens = len(of_places[0])
            slots[:num_tokens], positions[:num_tokens] = of_places
            num_padding -= num_tokens
        plan = self._plans.build(self._layout, sequences, num_padding, self._dummy_page)
        return Packed(slots, positions, *self._plans.extended(plan, self._num_sequences).arrays)


class _Graphed(GraphedAttention, AbsorbedLatents):
    def __init__(
        self, kernels: LatentKernels, packer: _Packer, memory: torch.Tensor, parts: Parts, num_programs: int
    ) -> None:
        """Args: memory: uint8 on the device, room for a plan; parts: the most of a plan. Sizes may share both."""
        self._packer = packer
        self._memory = memory
        super().__init__(kernels, LatentTables(*packer.pack(()).views(memory)), parts, num_programs)

    def plan(self, sequences: Sequence[TokenSequence]) -> None:
        self._packer.pack(sequences).copy_to(self._memory)
