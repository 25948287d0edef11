"""Products of adapters for tiles of few rows (shrink_rows.cu, expand_rows.cu). Needs CUDA."""

import torch
import triton

from tandem.engine.adapters.rows import TILE_ROWS, AdapterRows
from tandem.engine.adapters.weights import AdapterWeights
from tandem.engine.layers.cuda_kernel import CudaKernel, has_dependent_launch

PACKAGE = "tandem.engine.adapters"
# Warps of a block of each kernel, and steps of 32 inputs that a warp of shrink_rows.cu takes.
WARPS = {"shrink_rows": 16, "expand_rows": 4}
STEPS = 4
STEP_INPUTS = 32
# Ranks of a tile, and outputs of a warp of expand_rows.cu.
RANKS, OUTPUTS = 16, 64
# Numbers that a thread loads at once.
CHUNK = 8
# Blocks of a launch from which on they take tiles in turn: those of a graph's absent tiles cost time too.
MAX_BLOCKS = {"shrink_rows": 1024, "expand_rows": 2048}


class RowProducts:
    """Reads adapters once for up to 16 rows. Weights are requested while earlier kernels run.

    Many small blocks read all adapters of a batch at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_kernels = has_dependent_launch(device)
        self._kernels: dict[tuple[str, int, bool], CudaKernel] = {}

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
        num_splits = triton.cdiv(weights.a.shape[-1], WARPS["shrink_rows"] * STEPS * STEP_INPUTS)
        shape = num_splits, weights.num_parts, num_rows, held_rank(weights)
        return torch.empty(shape, dtype=torch.float32, device=self._device)

    def shrink(self, x: torch.Tensor, weights: AdapterWeights, rows: AdapterRows, shrunk: torch.Tensor) -> None:
        """Writes partial sums of rows with adapters.

        Args:
            x: (num_rows, in_size) bfloat16, contiguous.
            shrunk: of `new_sums`.
        """
        num_splits, num_parts, num_rows, rank = shrunk.shape
        self._kernel("shrink_rows", num_parts).launch(
            _grid("shrink_rows", num_splits * num_parts * (rank // RANKS), rows),
            32 * WARPS["shrink_rows"],
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
        self._kernel("expand_rows", num_parts, is_gated=is_gated).launch(
            _grid("expand_rows", triton.cdiv(out.shape[1], WARPS["expand_rows"] * OUTPUTS), rows),
            32 * WARPS["expand_rows"],
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
            macros = {"PARTS": num_parts, "WARPS": WARPS[name]}
            if name == "shrink_rows":
                macros["STEPS"] = STEPS
            else:
                macros["GATED"] = int(is_gated)
            self._kernels[key] = CudaKernel(PACKAGE, name, macros, self._device)
        return self._kernels[key]


def _grid(name: str, blocks_per_tile: int, rows: AdapterRows) -> tuple[int, int]:
    return blocks_per_tile, max(1, min(len(rows.tile_slots), MAX_BLOCKS[name] // blocks_per_tile))


def held_rank(weights: AdapterWeights) -> int:
    """Returns the ranks of partial sums: a multiple of what tensor cores multiply at once."""
    return max(RANKS, triton.next_power_of_2(weights.max_rank))
