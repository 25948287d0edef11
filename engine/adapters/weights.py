"""Matrices of the adapters that are on the device."""

from collections.abc import Sequence

import torch


class AdapterWeights:
    """Adapters of one merged matrix, a slot each.

    Part p, a projection, adds x A^T B to its outputs, with the first `ranks[slot, p]` rows of A and of B. Other rows
    of A may hold anything, those of B are zeros. B includes the scale.

    Attributes:
        a: (num_slots, num_parts, max_rank, in_size).
        b: (num_slots, max_rank * sum(out_sizes)); a part after another, (max_rank, out_size) each.
        ranks: (num_slots, num_parts) int32; 0: the adapter leaves the part as it is.
        firsts: of each part, its first output in the merged matrix; then their number.
    """

    def __init__(
        self,
        out_sizes: Sequence[int],
        in_size: int,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.a = torch.empty(num_slots, len(out_sizes), max_rank, in_size, dtype=dtype, device=device)
        self.b = torch.zeros(num_slots, max_rank * sum(out_sizes), dtype=dtype, device=device)
        self.ranks = torch.zeros(num_slots, len(out_sizes), dtype=torch.int32, device=device)
        self.out_sizes = tuple(out_sizes)
        self.firsts = tuple(sum(out_sizes[:part]) for part in range(len(out_sizes) + 1))

    @property
    def num_parts(self) -> int:
        return len(self.out_sizes)

    @property
    def max_rank(self) -> int:
        return self.a.shape[2]

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes + self.ranks.nbytes

    def b_of(self, slot: int, part: int) -> torch.Tensor:
        """Returns (max_rank, out_size)."""
        begin, end = (self.max_rank * first for first in self.firsts[part : part + 2])
        return self.b[slot, begin:end].view(self.max_rank, self.out_sizes[part])
