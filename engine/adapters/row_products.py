"""Products of adapters in bfloat16 (shrink_rows.cu, expand_rows.cu). Needs CUDA."""

import torch
import triton

from tandem.engine.adapters.rows import TILE_ROWS, AdapterRows
from tandem.engine.adapters.weights import AdapterWeights
from tandem.engine.layers.cuda_kernel import CudaKernel, has_dependent_launch

PACKAGE = "tandem.engine.adapters"
# A block of shrink_rows.cu multiplies WARPS stretches of STEPS * 32 inputs.
WARPS, STEPS = 4, 8
STEP_INPUTS = 32
# Ranks of a tile, and outputs of a warp of expand_rows.cu.
RANKS, OUTPUTS = 16, 64
# Numbers that a thread loads at once.
CHUNK = 8
# Blocks of a launch from which on they take tiles in turn: those of a graph's absent tiles cost time too.
MAX_BLOCKS = {"shrink_rows": 2048, "expand_rows": 2048}


class RowProducts:
    """Reads adapters once for up to 16 rows. Weights are requested while earlier kernels run.

    Many small blocks read all adapters of a batch at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_kernels = has_dependent_launch(device)
        self._kernels: dict[tuple[str, int, bool], CudaKernel] = {}

    def shrinks(self, weights: AdapterWeights, rows: AdapterRows) -> bool:
        """Returns whether `shrink` takes these rows: those of small tiles."""
        return self._fits(weights) and rows.tile_rows == TILE_ROWS[0][1] and weights.a.shape[-1] % CHUNK == 0

    def expands(self, weights: AdapterWeights) -> bool:
        return self._fits(weights) and all(size % OUTPUTS == 0 for size in weights.out_sizes)

    def _fits(self, weights: AdapterWeights) -> bool:
        return self._has_kernels and weights.a.dtype is torch.bfloat16

    def shrink(self, x: torch.Tensor, weights: AdapterWeights, rows: AdapterRows) -> torch.Tensor:
        """Returns partial sums of rows with adapters, (num_splits, num_parts, num_rows, rank), float32.

        Args:
            x: (num_rows, in_size) bfloat16, contiguous.
        """
        num_rows, in_size = x.shape
        rank = held_rank(weights)
        num_splits = triton.cdiv(in_size, WARPS * STEPS * STEP_INPUTS)
        shrunk = torch.empty(num_splits, weights.num_parts, num_rows, rank, dtype=torch.float32, device=self._device)
        self._kernel("shrink_rows", weights.num_parts).launch(
            _grid("shrink_rows", num_splits * weights.num_parts * (rank // RANKS), rows),
            32 * WARPS,
            x,
            weights.a,
            weights.ranks,
            *rows.tables,
            shrunk,
            num_rows,
            in_size,
            weights.max_rank,
            rank,
        )
        return shrunk

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
        self._kernel("expand_rows", num_parts, is_gated=is_gated).launch(
            _grid("expand_rows", triton.cdiv(out.shape[1], WARPS * OUTPUTS), rows),
            32 * WARPS,
            shrunk,
            weights.b,
            weights.ranks,
            *rows.tables,
            projected,
            out,
            num_rows,
            num_splits,
            rank,
            weights.max_rank,
            row_size,
            *ends[:2],
        )
        return out

    def _kernel(self, name: str, num_parts: int, *, is_gated: bool = False) -> CudaKernel:
        key = name, num_parts, is_gated
        if key not in self._kernels:
            macros = {"PARTS": num_parts, "WARPS": WARPS}
            macros |= {"STEPS": STEPS} if name == "shrink_rows" else {"GATED": int(is_gated)}
            self._kernels[key] = CudaKernel(PACKAGE, name, macros, self._device)
        return self._kernels[key]


def _grid(name: str, blocks_per_tile: int, rows: AdapterRows) -> tuple[int, int]:
    return blocks_per_tile, max(1, min(len(rows.tile_slots), MAX_BLOCKS[name] // blocks_per_tile))


def held_rank(weights: AdapterWeights) -> int:
    """Returns the ranks of partial sums: a multiple of what tensor cores multiply at once."""
    return max(RANKS, triton.next_power_of_2(weights.max_rank))
