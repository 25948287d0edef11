"""Attention over latents, planned for some of a forward pass's tokens. Needs CUDA."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from tandem.engine.attention.base import LatentAttention, LatentHeads
from tandem.engine.attention.latent_expansion import LatentExpansion
from tandem.engine.attention.latent_few_rows import LatentFewRows
from tandem.engine.attention.latent_kernels import attend, attend_parts
from tandem.engine.attention.latent_layout import LatentLayout, LatentPages
from tandem.engine.attention.latent_plan import Int32s, LatentPlans
from tandem.engine.attention.latent_write import rotate_write
from tandem.engine.attention.page_tables import Int64s, decode_slots, new_positions, prefill_slots
from tandem.engine.attention.scales import KvScales
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.rotary import Rotation
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.upload import Packed


class LatentTables(NamedTuple):
    """On the device; attributes: slots, positions: (num_tokens,), int64 and int32; the others: of LatentPlan."""

    slots: torch.Tensor
    positions: torch.Tensor
    items: torch.Tensor
    merges: torch.Tensor
    pages: torch.Tensor


def places(layout: LatentLayout, sequences: Sequence[TokenSequence]) -> tuple[Int64s, Int32s]:
    """Returns slots and positions of the new tokens: (num_tokens,)."""
    if all(s.device_len - s.cached_len == 1 for s in sequences):
        return decode_slots(layout, sequences), np.array([s.cached_len for s in sequences], np.int32)
    return prefill_slots(layout, sequences), new_positions(sequences).astype(np.int32)


class Parts(NamedTuple):
    """
    Attributes:
        sums: (num_parts, tile_rows, kv_rank) float32.
        log_sums: (num_parts, tile_rows) float32.
        most_of_tile: parts that a tile may have.
    """

    sums: torch.Tensor
    log_sums: torch.Tensor
    most_of_tile: int


class LatentKernels:
    def __init__(self, layout: LatentLayout, pages: LatentPages, kv_scales: KvScales) -> None:
        self.layout = layout
        self.device = pages.keys.device
        self._pages = pages
        self._scales = kv_scales.keys
        self._few_rows = LatentFewRows(self.device)

    def parts(self, num_parts: int, plans: LatentPlans) -> Parts:
        shape = max(1, num_parts), plans.tile_rows
        sums = torch.empty(*shape, self.layout.kv_rank, dtype=torch.float32, device=self.device)
        return Parts(sums, torch.empty(shape, dtype=torch.float32, device=self.device), plans.most_parts)

    def write(
        self, slots: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, norm: Norm, rotation: Rotation, layer: int
    ) -> None:
        rotate_write(q, kv, norm, rotation, self._pages, layer, slots, self._scales[layer])

    def absorbed(
        self,
        tables: LatentTables,
        parts: Parts,
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
        nope_dim, scale = q_dim - self.layout.rope_dim, self._scales[layer]
        if self._few_rows.fits(q, heads.keys, heads.values):
            absorbed = self._few_rows.queries(
                q, kv, heads.keys, norm, rotation, self._pages, layer, tables.slots, scale
            )
            latents = torch.empty_like(absorbed)
            attend_parts(
                absorbed,
                q[..., nope_dim:],
                self._pages,
                layer,
                tables.items,
                tables.pages,
                parts.sums,
                parts.log_sums,
                heads.scale,
                num_programs,
                latents,
                scale,
            )
            self._few_rows.outputs(parts.sums, parts.log_sums, latents, tables.merges, heads.values, out)
            return
        self.write(tables.slots, q, kv, norm, rotation, layer)
        absorbed = torch.bmm(q[..., :nope_dim].transpose(0, 1), heads.keys)  # (num_heads, num_tokens, kv_rank)
        latents = torch.empty_like(absorbed)
        attend(
            absorbed,
            q[..., nope_dim:],
            self._pages,
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
            scale,
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


class AbsorbedLatents(PlannedLatents):
    def __init__(self, kernels: LatentKernels, tables: LatentTables, parts: Parts, num_programs: int) -> None:
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


class ExpandedLatents(PlannedLatents):
    """One prompt."""

    def __init__(self, kernels: LatentKernels, expansion: LatentExpansion, prompt: TokenSequence) -> None:
        self._kernels = kernels
        self._expansion = expansion
        packed = Packed(*places(kernels.layout, [prompt]), expansion.slots(prompt))
        self._slots, self.positions, self._read_slots = packed.to(kernels.device)

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
        self._expansion.attend(q, self._read_slots, heads, layer, out)


class JoinedLatents(LatentAttention):
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
