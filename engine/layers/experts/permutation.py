"""Sorts pairs (token, expert) by expert, on the device. Needs CUDA."""

from typing import NamedTuple

import torch

from tandem.engine.layers.cuda_kernel import CudaKernel

# Pairs of a block.
PAIRS = 1024
MAX_EXPERTS = 512


class Permutation(NamedTuple):
    """Places of pairs, sorted by expert; pairs of one expert keep the order of their tokens.

    Pairs are numbered token * k + j. Places from offsets[-1] on do not exist.

    Attributes:
        order: (num_tokens * k,) int32, the pair of each place.
        places: (num_tokens, k) int32, the place of each pair; -1 for experts of other devices.
        offsets: (num_experts + 1,) int32, the first place of each expert.
        tiles: (1 + max_tiles, 4) int32; first the number of tiles, then each tile's expert, first place and end.
        max_tiles: upper bound of the number of tiles.
    """

    order: torch.Tensor
    places: torch.Tensor
    offsets: torch.Tensor
    tiles: torch.Tensor
    max_tiles: int


class Permuter:
    """Sorts by two kernels, without the host's knowledge of the counts."""

    def __init__(self, num_experts: int, device: torch.device) -> None:
        """Args: num_experts: experts of this device, at most MAX_EXPERTS."""
        assert 0 < num_experts <= MAX_EXPERTS
        macros = {"EXPERTS": num_experts, "PAIRS": PAIRS}
        self._num_experts = num_experts
        self._count = CudaKernel(__package__, "count_pairs", macros, device)
        self._place = CudaKernel(__package__, "place_pairs", macros, device)

    def permute(self, experts: torch.Tensor, tile_rows: int, first_expert: int = 0) -> Permutation:
        """
        Args:
            experts: (num_tokens, k) int32.
            tile_rows: places of a tile. A tile has one expert; its last tile may be shorter.
            first_expert: first of this device's experts. Pairs of other experts have no place.
        """
        assert experts.is_contiguous() and experts.dtype is torch.int32
        num_pairs = experts.numel()
        num_blocks = -(-num_pairs // PAIRS)
        max_tiles = num_pairs // tile_rows + min(self._num_experts, num_pairs)
        counts = experts.new_empty(num_blocks, self._num_experts)
        result = Permutation(
            experts.new_empty(num_pairs),
            torch.empty_like(experts),
            experts.new_empty(self._num_experts + 1),
            experts.new_empty(1 + max_tiles, 4),
            max_tiles,
        )
        self._count.launch((num_blocks, 1), PAIRS, experts, counts, num_pairs, first_expert)
        self._place.launch((num_blocks, 1), PAIRS, experts, counts, *result[:4], num_pairs, first_expert, tile_rows)
        return result
