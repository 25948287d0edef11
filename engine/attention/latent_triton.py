"""Attention over latents by Tandem's Triton kernels. Needs CUDA."""

from abc import abstractmethod
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

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
from tandem.engine.attention.latent_few_rows import LatentFewRows
from tandem.engine.attention.latent_kernels import attend, attend_parts
from tandem.engine.attention.latent_layout import LatentLayout
from tandem.engine.attention.latent_plan import Int32s, LatentPlans, decode_plans, prompt_plans
from tandem.engine.attention.latent_write import rotate_write
from tandem.engine.attention.page_tables import Int64s, decode_slots, new_positions, prefill_slots
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
        self._kernels = _Kernels(layout, layout.view(pool.memory_and_dummy))
        self._dummy_page = pool.num_pages
        self._num_heads = num_q_heads
        self._num_programs = torch.cuda.get_device_properties(self._device).multi_processor_count
        self.expansion = LatentExpansion(layout, layout.view(pool.memory), num_q_heads)
        self._planned: LatentAttention | None = None

    def plan(self, batch: Batch) -> None:
        parts: list[PlannedLatents] = []
        if batch.decoded:
            # Drafts share reads of latents in tiles, as prompts do.
            plans_of = prompt_plans if batch.num_drafts else decode_plans
            plans = plans_of(batch.num_decoded_tokens, self._num_heads, self._num_programs)
            parts.append(self._plan_absorbed(batch.decoded, plans))
        num_prompt_tokens = sum(s.extend_len for s in batch.prompts)
        plans = prompt_plans(num_prompt_tokens, self._num_heads, self._num_programs)
        for is_expanded, prompts in groupby(batch.prompts, self.expansion.is_faster):
            if not is_expanded:
                parts.append(self._plan_absorbed(list(prompts), plans))
                continue
            parts += (_Expanded(self._kernels, self.expansion, prompt) for prompt in prompts)
        self._planned = parts[0] if len(parts) == 1 else _Joined(parts)

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, norm: Norm, rotation: Rotation, heads: LatentHeads, layer: int
    ) -> torch.Tensor:
        assert self._planned is not None
        return self._planned.attend(q, kv, norm, rotation, heads, layer)

    def _plan_absorbed(self, sequences: Sequence[TokenSequence], plans: LatentPlans) -> "PlannedLatents":
        plan = plans.build(self._layout, sequences)
        packed = Packed(*_places(self._layout, sequences), *plan.arrays)
        parts = self._kernels.parts(plan.num_parts, plans)
        return _Absorbed(self._kernels, _Tables(*packed.to(self._device)), parts, self._num_programs)

    def for_graphs(self, batch_sizes: Sequence[int], max_pages_per_sequence: int) -> dict[int, GraphedAttention]:
        plans = {size: decode_plans(size, self._num_heads, self._num_programs) for size in batch_sizes}
        return self._graphed(plans, {size: size for size in batch_sizes}, max_pages_per_sequence)

    def for_draft_graphs(self, sizes: Sequence[int], max_pages_per_sequence: int) -> dict[int, GraphedAttention]:
        plans = {size: prompt_plans(size, self._num_heads, self._num_programs) for size in sizes}
        # Each token may be of another sequence, and padding is one more.
        return self._graphed(plans, {size: size + 1 for size in sizes}, max_pages_per_sequence)

    def for_prefill_graphs(
        self, sizes: Sequence[int], max_sequences: int, max_pages_per_sequence: int
    ) -> dict[int, GraphedAttention]:
        plans = {size: prompt_plans(size, self._num_heads, self._num_programs) for size in sizes}
        # Padding is one more sequence.
        return self._graphed(plans, dict.fromkeys(sizes, max_sequences + 1), max_pages_per_sequence)

    def joined(self, decode: GraphedAttention, prefill: GraphedAttention) -> Attention:
        assert isinstance(decode, _Graphed) and isinstance(prefill, _Graphed)
        return _Joined([decode, prefill])

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


class _Tables(NamedTuple):
    """On the device; attributes: slots, positions: (num_tokens,), int64 and int32; the others: of LatentPlan."""

    slots: torch.Tensor
    positions: torch.Tensor
    items: torch.Tensor
    merges: torch.Tensor
    pages: torch.Tensor


def _places(layout: LatentLayout, sequences: Sequence[TokenSequence]) -> tuple[Int64s, Int32s]:
    """Returns slots and positions of the new tokens: (num_tokens,)."""
    if all(s.device_len - s.cached_len == 1 for s in sequences):
        return decode_slots(layout, sequences), np.array([s.cached_len for s in sequences], np.int32)
    return prefill_slots(layout, sequences), new_positions(sequences).astype(np.int32)


class _Parts(NamedTuple):
    """
    Attributes:
        sums: (num_parts, tile_rows, kv_rank) float32.
        log_sums: (num_parts, tile_rows) float32.
        most_of_tile: parts that a tile may have.
    """

    sums: torch.Tensor
    log_sums: torch.Tensor
    most_of_tile: int


class _Kernels:
    def __init__(self, layout: LatentLayout, pool: torch.Tensor) -> None:
        self.layout = layout
        self.device = pool.device
        self._pool = pool
        self._few_rows = LatentFewRows(pool.device)

    def parts(self, num_parts: int, plans: LatentPlans) -> _Parts:
        shape = max(1, num_parts), plans.tile_rows
        sums = torch.empty(*shape, self.layout.kv_rank, dtype=torch.float32, device=self.device)
        return _Parts(sums, torch.empty(shape, dtype=torch.float32, device=self.device), plans.most_parts)

    def write(
        self, slots: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, norm: Norm, rotation: Rotation, layer: int
    ) -> None:
        rotate_write(q, kv, norm, rotation, self._pool, layer, slots, self.layout.kv_rank)

    def absorbed(
        self,
        tables: _Tables,
        parts: _Parts,
        num_programs: int,
        q: torch.Tensor,
        kv: torch.Tensor,
        norm: Norm,
        rotation: Rotation,
        heads: LatentHeads,
        layer: int,
        out: torch.Tensor,
    ) -> None:
        """As PlannedLatents.run, by absorbed queries."""
        num_tokens, num_heads, q_dim = q.shape
        nope_dim = q_dim - self.layout.rope_dim
        if self._few_rows.fits(q, heads.keys, heads.values):
            absorbed = self._few_rows.queries(q, kv, heads.keys, norm, rotation, self._pool, layer, tables.slots)
            latents = torch.empty_like(absorbed)
            attend_parts(
                absorbed,
                q[..., nope_dim:],
                self._pool,
                layer,
                tables.items,
                tables.pages,
                parts.sums,
                parts.log_sums,
                heads.scale,
                num_programs,
                latents,
            )
            self._few_rows.outputs(parts.sums, parts.log_sums, latents, tables.merges, heads.values, out)
            return
        self.write(tables.slots, q, kv, norm, rotation, layer)
        absorbed = torch.bmm(q[..., :nope_dim].transpose(0, 1), heads.keys)  # (num_heads, num_tokens, kv_rank)
        latents = torch.empty_like(absorbed)
        attend(
            absorbed,
            q[..., nope_dim:],
            self._pool,
            layer,
            tables.items,
            tables.merges,
            tables.pages,
            parts.sums,
            parts.log_sums,
            parts.most_of_tile,
            heads.scale,
            num_programs,
            latents,
        )
        by_head = out.view(num_tokens, num_heads, -1).transpose(0, 1)
        torch.bmm(latents, heads.values.transpose(1, 2), out=by_head)


class PlannedLatents(LatentAttention):
    """Attention planned for some of a forward pass's tokens.

    Attributes:
        positions: (num_tokens,) int32 on the device.
    """

    positions: torch.Tensor

    def attend(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        norm: Norm,
        rotation: Rotation,
        heads: LatentHeads,
        layer: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As LatentAttention.attend. Args: out: contiguous memory for the result."""
        if out is None:
            out = q.new_empty(len(q), q.shape[1] * heads.values.shape[1])
        self.run(q, kv, norm, rotation.of(self.positions), heads, layer, out)
        return out

    @abstractmethod
    def run(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        norm: Norm,
        rotation: Rotation,
        heads: LatentHeads,
        layer: int,
        out: torch.Tensor,
    ) -> None:
        """As `attend`, into `out`."""


class _Absorbed(PlannedLatents):
    def __init__(self, kernels: _Kernels, tables: _Tables, parts: _Parts, num_programs: int) -> None:
        self.positions = tables.positions
        self._kernels = kernels
        self._tables = tables
        self._parts = parts
        self._num_programs = num_programs

    def run(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        norm: Norm,
        rotation: Rotation,
        heads: LatentHeads,
        layer: int,
        out: torch.Tensor,
    ) -> None:
        self._kernels.absorbed(self._tables, self._parts, self._num_programs, q, kv, norm, rotation, heads, layer, out)


class _Expanded(PlannedLatents):
    """One prompt."""

    def __init__(self, kernels: _Kernels, expansion: LatentExpansion, prompt: TokenSequence) -> None:
        self._kernels = kernels
        self._expansion = expansion
        packed = Packed(*_places(kernels.layout, [prompt]), expansion.rows(prompt))
        self._slots, self.positions, self._rows = packed.to(kernels.device)

    def run(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        norm: Norm,
        rotation: Rotation,
        heads: LatentHeads,
        layer: int,
        out: torch.Tensor,
    ) -> None:
        self._kernels.write(self._slots, q, kv, norm, rotation, layer)
        self._expansion.attend(q, self._rows, heads, layer, out)


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
            places = _places(self._layout, sequences)
            num_tokens = len(places[0])
            slots[:num_tokens], positions[:num_tokens] = places
            num_padding -= num_tokens
        plan = self._plans.build(self._layout, sequences, num_padding, self._dummy_page)
        return Packed(slots, positions, *self._plans.extended(plan, self._num_sequences).arrays)


class _Graphed(GraphedAttention, PlannedLatents):
    def __init__(
        self, kernels: _Kernels, packer: _Packer, memory: torch.Tensor, parts: _Parts, num_programs: int
    ) -> None:
        """Args: memory: uint8 on the device, room for a plan; parts: the most of a plan. Sizes may share both."""
        self._packer = packer
        self._memory = memory
        tables = _Tables(*packer.pack(()).views(memory))
        self.positions = tables.positions
        self._absorbed = _Absorbed(kernels, tables, parts, num_programs)

    def plan(self, sequences: Sequence[TokenSequence]) -> None:
        self._packer.pack(sequences).copy_to(self._memory)

    def run(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        norm: Norm,
        rotation: Rotation,
        heads: LatentHeads,
        layer: int,
        out: torch.Tensor,
    ) -> None:
        self._absorbed.run(q, kv, norm, rotation, heads, layer, out)


class _Joined(LatentAttention):
    def __init__(self, parts: Sequence[PlannedLatents]) -> None:
        self._parts = parts

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, norm: Norm, rotation: Rotation, heads: LatentHeads, layer: int
    ) -> torch.Tensor:
        out = q.new_empty(len(q), q.shape[1] * heads.values.shape[1])
        lengths = [len(part.positions) for part in self._parts]
        pieces = zip(q.split(lengths), kv.split(lengths), out.split(lengths), strict=True)
        for part, (q_piece, kv_piece, into) in zip(self._parts, pieces, strict=True):
            part.attend(q_piece, kv_piece, norm, rotation, heads, layer, into)
        return out
