"""Products of adapters, whose rows may each have another one."""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from tandem.engine.adapters.rows import AdapterRows
from tandem.engine.adapters.weights import AdapterWeights
from tandem.engine.layers.linear import LinearBase


class AdapterProducts(ABC):
    def begin(self) -> None:  # noqa: B027
        """Call before the first product of a forward pass."""

    def gated(self, x: torch.Tensor, linear: LinearBase, rows: AdapterRows) -> torch.Tensor | None:
        """Returns silu(first half of each row) * second half of the base's and the adapters' products together; None:
        not at once.

        Args:
            x: (num_rows, in_size), contiguous.
        """
        return None

    def num_beside(self, num_rows: int) -> int:
        """Returns the multiprocessors that `shrink` is to have beside the base's product."""
        return 0

    @abstractmethod
    def shrink(self, x: torch.Tensor, weights: AdapterWeights, rows: AdapterRows) -> torch.Tensor:
        """Returns the products of rows and A, for `expand`. Args: x: (num_rows, in_size), contiguous."""

    @abstractmethod
    def expand(self, shrunk: torch.Tensor, weights: AdapterWeights, rows: AdapterRows, out: torch.Tensor) -> None:
        """Adds the products with B to `out`, (num_rows, sum(out_sizes)), contiguous. Rows without an adapter stay as
        they are."""

    @abstractmethod
    def expand_gated(
        self, shrunk: torch.Tensor, weights: AdapterWeights, rows: AdapterRows, projected: torch.Tensor
    ) -> torch.Tensor:
        """Returns silu(first half of each row) * second half, of all rows, with the products with B added to
        `projected`, which may be overwritten."""


class ReferenceProducts(AdapterProducts):
    """Plain torch. Waits for the device."""

    def shrink(self, x: torch.Tensor, weights: AdapterWeights, rows: AdapterRows) -> torch.Tensor:
        """Returns (num_rows, num_parts, max_rank)."""
        shrunk = x.new_zeros(len(x), weights.num_parts, weights.max_rank)
        for slot, numbers in _tiles(rows):
            for part, rank in enumerate(weights.ranks[slot].tolist()):
                shrunk[numbers, part, :rank] = x[numbers] @ weights.a[slot, part, :rank].t()
        return shrunk

    def expand(self, shrunk: torch.Tensor, weights: AdapterWeights, rows: AdapterRows, out: torch.Tensor) -> None:
        for slot, numbers in _tiles(rows):
            for part, rank in enumerate(weights.ranks[slot].tolist()):
                first, end = weights.firsts[part : part + 2]
                out[numbers, first:end] += shrunk[numbers, part, :rank] @ weights.b_of(slot, part)[:rank]

    def expand_gated(
        self, shrunk: torch.Tensor, weights: AdapterWeights, rows: AdapterRows, projected: torch.Tensor
    ) -> torch.Tensor:
        self.expand(shrunk, weights, rows, projected)
        gate, up = projected.chunk(2, dim=-1)
        return F.silu(gate) * up


def _tiles(rows: AdapterRows) -> list[tuple[int, torch.Tensor]]:
    """Returns the slot of each tile and its rows."""
    tiles = zip(rows.tile_slots.tolist(), rows.tile_begins.tolist(), rows.tile_ends.tolist(), strict=True)
    return [(slot, rows.order[begin:end].long()) for slot, begin, end in tiles if slot >= 0]
