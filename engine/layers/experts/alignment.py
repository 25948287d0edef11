"""Sorts the pairs of tokens and experts by expert, and cuts them into tiles (alignment.cu). Needs CUDA."""

from typing import NamedTuple

import torch

from tandem.engine.layers.cuda_kernel import CudaKernel

THREADS = 512
# Experts of a block.
OWN = 4
MAX_EXPERTS = 512
# Counts have 16 bits.
MAX_PAIRS = 2**16 - 1


class Alignment(NamedTuple):
    """Pair token * k + j is a token and its j-th expert.

    Attributes:
        pairs: (num_pairs,) int32, local pairs by expert, in order within an expert. Others are left out, so the end is
            arbitrary.
        tiles: (3, max_tiles) int32: local expert, first place in `pairs`, end of the expert's places.
        num_tiles: (1,) int32; tiles beyond it are arbitrary.
    """

    pairs: torch.Tensor
    tiles: torch.Tensor
    num_tiles: torch.Tensor


class Aligner:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kernels: dict[int, CudaKernel] = {}

    def align(self, experts: torch.Tensor, num_experts: int, tile_rows: int, first_expert: int = 0) -> Alignment:
        """Skips pairs whose expert is not of `num_experts` experts from `first_expert` on.

        Args:
            experts: (num_tokens, k) int32, contiguous, at most MAX_PAIRS.
            num_experts: at most MAX_EXPERTS.
            tile_rows: most pairs of a tile.
        """
        num_pairs = experts.numel()
        assert experts.is_contiguous() and num_pairs <= MAX_PAIRS and num_experts <= MAX_EXPERTS
        kernel = self._kernels.get(num_experts)
        if kernel is None:
            macros = {"EXPERTS": num_experts, "THREADS": THREADS, "OWN": OWN}
            kernel = self._kernels[num_experts] = CudaKernel(__package__, "alignment", macros, self._device)
        limit = max_tiles(num_pairs, num_experts, tile_rows)
        pairs = torch.empty(num_pairs, dtype=torch.int32, device=self._device)
        tiles = torch.empty(3, limit, dtype=torch.int32, device=self._device)
        num_tiles = torch.empty(1, dtype=torch.int32, device=self._device)
        num_blocks = -(-num_experts // OWN)
        kernel.launch(
            (num_blocks, 1), THREADS, experts, pairs, tiles, num_tiles, num_pairs, tile_rows, limit, first_expert
        )
        return Alignment(pairs, tiles, num_tiles)


def max_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """Returns the most tiles that any routing needs: each expert has at most one tile that is not full."""
    num_partial = min(num_pairs, num_experts)
    return (num_pairs + num_partial * (tile_rows - 1)) // tile_rows
