"""Products of adapters for tiles of few rows (shrink_rows.cu, expand_rows.cu). Needs CUDA."""

import torch
import triton

from tandem.engine.adapters.rows import TILE_ROWS, AdapterRows
from tandem.engine.adapters.weights import AdapterWeights
from tandem.engine.layers.cuda_kernel import CudaKernel, has_dependent_launch

PACKAGE = "tandem.engine.adapters"
# Warps of a block, and steps of 32 inputs that a warp of shrink_rows.cu takes. Measured on an H200 with an 8B model.
SHRINK_WARPS, EXPAND_WARPS, GATED_WARPS = 16, 2, 4
STEPS = 4
STEP_INPUTS = 32
# Ranks of a tile, and outputs of a warp of expand_rows.cu.
RANKS, OUTPUTS = 16, 64
# Numbers that a thread loads at once.
CHUNK = 8
# Blocks of a launch at most; they take tiles in turn. Those of a graph's absent tiles cost time too.
MAX_SHRINK_BLOCKS, MAX_EXPAND_BLOCKS = 1024, 4096


class RowProducts:
    """Reads adapters once for up to 16 rows. Weights are requested while earlier kernels run.

    Many small blocks read all adapters of a batch at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_kernels = has_dependent_launch(device)
        self._kernels: dict[tuple[str, frozenset[tuple[str, int]]], CudaKernel] = {}

    def fit(self, weights: AdapterWeights, rows: AdapterRows) -> bool:
        return (
            self._has_kernels
            and weights.a.dtype is torch.bfloat16
            and rows.tile_rows == TILE_ROWS[0][1]
            and weights.a.shape[-1] % CHUNK == 0
            and all(size % OUTPUTS == 0 for size in weights.out_sizes)
        )

    def new_sums(self, num_rows: int, weights: AdapterWeights) -> torch.Tensor:
        """Returns memory for `shrink`, (num_splits, num_parts, num_rows, rank), float32."""
        num_splits = triton.cdiv(weights.a.shape[-1], SHRINK_WARPS * STEPS * STEP_INPUTS)
        shape = num_splits, weights.num_parts, num_rows, held_rank(weights)
        return torch.empty(shape, dtype=torch.float32, device=self._device)

    def shrink(self, x: torch.Tensor, weights: AdapterWeights, rows: AdapterRows, shrunk: torch.Tensor) -> None:
        """Writes partial sums of rows with adapters.

        Args:
            x: (num_rows, in_size) bfloat16, contiguous.
            shrunk: of `new_sums`.
        """
        num_splits, num_parts, num_rows, rank = shrunk.shape
        blocks_per_tile = num_splits * num_parts * (rank // RANKS)
        self._kernel("shrink_rows", PARTS=num_parts, STEPS=STEPS, WARPS=SHRINK_WARPS).launch(
            (blocks_per_tile, _num_tile_blocks(rows, MAX_SHRINK_BLOCKS // blocks_per_tile)),
            32 * SHRINK_WARPS,
            x,
            weights.a,
            weights.ranks,
            *rows.tables,
            shrunk,
            num_rows,
            x.shape[1],
            weights.max_rank,
            rank,
        )

    def expand(
        self,
        shrunk: torch.Tensor,
        weights: AdapterWeights,
        rows: AdapterRows,
        projected: torch.Tensor,
        *,
        is_gated: bool = False,
    ) -> torch.Tensor:
        """Adds products with B to `projected`, (num_rows, row_size) bfloat16, and returns it.

        Args:
            is_gated: return silu(first half of each row) * second half instead, of all rows.
        """
        num_splits, num_parts, num_rows, rank = shrunk.shape
        row_size = sum(weights.out_sizes)
        out = projected
        if is_gated:
            out = torch.empty(num_rows, row_size // 2, dtype=projected.dtype, device=self._device)
        ends = (*weights.firsts[1:], row_size)
        warps = GATED_WARPS if is_gated else EXPAND_WARPS
        blocks_per_tile = triton.cdiv(out.shape[1], warps * OUTPUTS)
        self._kernel("expand_rows", PARTS=num_parts, SPLITS=num_splits, WARPS=warps, GATED=int(is_gated)).launch(
            (blocks_per_tile, _num_tile_blocks(rows, MAX_EXPAND_BLOCKS // blocks_per_tile)),
            32 * warps,
            shrunk,
            weights.b,
            weights.ranks,
            *rows.tables,
            projected,
            out,
            num_rows,
            rank,
            weights.max_rank,
            row_size,
            *ends[:2],
        )
        return out

    def _kernel(self, name: str, **macros: int) -> CudaKernel:
        key = name, frozenset(macros.items())
        if key not in self._kernels:
            self._kernels[key] = CudaKernel(PACKAGE, name, macros, self._device)
        return self._kernels[key]


def _num_tile_blocks(rows: AdapterRows, most: int) -> int:
    return max(1, min(len(rows.tile_slots), most))


def held_rank(weights: AdapterWeights) -> int:
    """Returns the ranks of partial sums: a multiple of what tensor cores multiply at once."""
    return max(RANKS, triton.next_power_of_2(weights.max_rank))
