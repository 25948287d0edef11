"""Products of adapters by Triton kernels, for tiles of many rows. Needs CUDA, or Triton's interpreter.

Both kernels multiply tiles of rows that share an adapter. Blocks take tiles in turn, and read from memory how many
there are, so that one CUDA graph serves any mix of adapters. Few rows have kernels of their own (row_products.py).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tandem.engine.adapters.fused_products import FusedProducts
from tandem.engine.adapters.gated_products import GatedAdapterProducts
from tandem.engine.adapters.products import AdapterProducts
from tandem.engine.adapters.row_products import RowProducts, held_rank
from tandem.engine.adapters.rows import TILE_ROWS, AdapterRows
from tandem.engine.adapters.weights import AdapterWeights
from tandem.engine.layers.linear import LinearBase

# Most merged projections: queries, keys and values.
MAX_PARTS = 3
# Blocks of a shrink that keep a device busy. Splits of a row's product reach it, each of at least MIN_SPLIT numbers.
NUM_BLOCKS = 256
MAX_SPLITS = 8
MIN_SPLIT = 512
# Blocks that take tiles of the fewest rows in turn. More would wait for nothing in steps of few adapters.
MAX_TILE_BLOCKS = 16
# Outputs of a tile, for matrices of at least so many outputs.
OUTPUTS = ((0, 64), (2048, 128), (8192, 256))
MAX_OUTPUTS_OF_LARGE_TILES = 128
# Tiles of so many rows keep their sums in the registers of twice as many warps.
ROWS_OF_MANY_WARPS = 64
# A tile has as many of the gate and of the other half.
MAX_GATED_OUTPUTS = 128
# Ranks of all parts that a block multiplies at once, so that rows are read once.
MAX_COLUMNS = 128
# Multiprocessors that a product of up to so many rows leaves to a shrink beside it: it waits for memory, not for them.
NUM_BESIDE, MAX_ROWS_BESIDE = 8, 128


class Shape(NamedTuple):
    """Tiles of both kernels for some rows.

    Attributes:
        num_tile_blocks: blocks that take tiles in turn.
        depth: inputs of a step.
        num_splits, num_steps: of each row's product with A.
        outputs: of a tile of the product with B.
        num_warps: of a block that multiplies by B.
    """

    num_tile_blocks: int
    depth: int
    num_splits: int
    num_steps: int
    outputs: int
    num_warps: int


def shape_for(rows: AdapterRows, weights: AdapterWeights) -> Shape:
    in_size, num_rows, num_tiles = weights.a.shape[-1], len(rows.order), len(rows.tile_slots)
    is_small = rows.tile_rows == TILE_ROWS[0][1]
    least_blocks = max(1, num_rows // rows.tile_rows) * _num_groups(weights)
    wanted = max(1, min(MAX_SPLITS, NUM_BLOCKS // least_blocks, in_size // MIN_SPLIT))
    depth = 128 if is_small else 64
    num_steps = -(-in_size // (depth * wanted))
    outputs = max(size for least, size in OUTPUTS if max(weights.out_sizes) >= least)
    return Shape(
        min(num_tiles, MAX_TILE_BLOCKS) if is_small else num_tiles,
        depth,
        -(-in_size // (depth * num_steps)),
        num_steps,
        outputs if is_small else min(outputs, MAX_OUTPUTS_OF_LARGE_TILES),
        8 if rows.tile_rows >= ROWS_OF_MANY_WARPS else 4,
    )


class TritonProducts(AdapterProducts):
    """In a CUDA graph `shrink` runs beside the base's product, on a branch that `expand` joins."""

    def __init__(self, device: torch.device) -> None:
        self._branch = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._has_branched = False
        self._fused = FusedProducts(device) if device.type == "cuda" else None
        self._of_few_rows = RowProducts(device) if device.type == "cuda" else None
        self._gated = GatedAdapterProducts(device) if device.type == "cuda" else None

    def begin(self) -> None:
        if self._fused is not None:
            self._fused.begin()

    def gated(self, x: torch.Tensor, linear: LinearBase, rows: AdapterRows) -> torch.Tensor | None:
        weights = linear.adapters
        if self._fused is None or self._gated is None or weights is None:
            return None
        if (tile := self._gated.tile(len(x), linear, weights)) is not None:
            shrunk = self.shrink(x, weights, rows)
            self._join()
            return self._gated.multiply(x, linear, tile, shrunk, rows)
        shape = self._fused.shape(len(x), linear, weights)
        return None if shape is None else self._fused.multiply(x, linear, weights, rows, shape)

    def num_beside(self, num_rows: int) -> int:
        return NUM_BESIDE if num_rows <= MAX_ROWS_BESIDE and self._is_branching() else 0

    def shrink(self, x: torch.Tensor, weights: AdapterWeights, rows: AdapterRows) -> torch.Tensor:
        """Returns partial sums, (num_splits, num_parts, num_rows, rank), float32, of rows with adapters."""
        assert x.is_contiguous() and weights.num_parts <= MAX_PARTS
        of_few_rows = self._fitting(weights, rows)
        if of_few_rows is not None:
            shrunk = of_few_rows.new_sums(len(x), weights)
        else:
            sizes = shape_for(rows, weights).num_splits, weights.num_parts, len(x), held_rank(weights)
            shrunk = torch.empty(sizes, dtype=torch.float32, device=x.device)
        if not rows.has_adapters:
            return shrunk

        def run() -> None:
            if of_few_rows is not None:
                of_few_rows.shrink(x, weights, rows, shrunk)
            else:
                self._shrink(x, weights, rows, shrunk)

        # Outside of a capture, another stream would cost the host more than it saves the device.
        if self._branch is not None and self._is_branching():
            self._has_branched = True
            self._branch.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._branch):
                run()
        else:
            run()
        return shrunk

    def expand(self, shrunk: torch.Tensor, weights: AdapterWeights, rows: AdapterRows, out: torch.Tensor) -> None:
        assert out.is_contiguous()
        num_splits, num_parts, num_rows, rank = shrunk.shape
        if not rows.has_adapters:
            return
        self._join()
        if (of_few_rows := self._fitting(weights, rows)) is not None:
            of_few_rows.expand(shrunk, weights, rows, out)
            return
        shape = shape_for(rows, weights)
        firsts = weights.firsts + weights.firsts[-1:] * (MAX_PARTS - num_parts)
        num_output_tiles = triton.cdiv(max(weights.out_sizes), shape.outputs)
        launch: Any = _expand[shape.num_tile_blocks, num_output_tiles, num_parts]
        launch(
            shrunk,
            weights.b,
            weights.ranks,
            *rows.tables,
            out,
            num_rows,
            *firsts[1:],
            out.shape[1],
            weights.max_rank,
            NUM_SPLITS=num_splits,
            PARTS=num_parts,
            RANK=rank,
            ROWS=rows.tile_rows,
            OUTPUTS=shape.outputs,
            EXACT=out.dtype is torch.float32,
            num_warps=shape.num_warps,
        )

    def expand_gated(
        self, shrunk: torch.Tensor, weights: AdapterWeights, rows: AdapterRows, projected: torch.Tensor
    ) -> torch.Tensor:
        assert projected.is_contiguous()
        self._join()
        if (of_few_rows := self._fitting(weights, rows)) is not None:
            return of_few_rows.expand(shrunk, weights, rows, projected, is_gated=True)
        num_splits, _, num_rows, rank = shrunk.shape
        size = projected.shape[1] // 2
        out = torch.empty(num_rows, size, dtype=projected.dtype, device=projected.device)
        shape = shape_for(rows, weights)
        outputs = min(shape.outputs, MAX_GATED_OUTPUTS)
        launch: Any = _expand_gated[shape.num_tile_blocks, triton.cdiv(size, outputs)]
        launch(
            shrunk,
            weights.b,
            weights.ranks,
            *rows.tables,
            projected,
            out,
            num_rows,
            size,
            weights.max_rank,
            NUM_SPLITS=num_splits,
            RANK=rank,
            ROWS=rows.tile_rows,
            OUTPUTS=outputs,
            EXACT=out.dtype is torch.float32,
            num_warps=shape.num_warps,
        )
        return out

    def _fitting(self, weights: AdapterWeights, rows: AdapterRows) -> RowProducts | None:
        """Returns the kernels of few rows, if they multiply these."""
        return self._of_few_rows if self._of_few_rows is not None and self._of_few_rows.fit(weights, rows) else None

    def _is_branching(self) -> bool:
        return self._branch is not None and torch.cuda.is_current_stream_capturing()

    def _join(self) -> None:
        if self._has_branched and self._branch is not None:
            torch.cuda.current_stream().wait_stream(self._branch)
        self._has_branched = False

    def _shrink(self, x: torch.Tensor, weights: AdapterWeights, rows: AdapterRows, shrunk: torch.Tensor) -> None:
        shape = shape_for(rows, weights)
        launch: Any = _shrink[shape.num_tile_blocks, _num_groups(weights), shape.num_splits]
        launch(
            x,
            weights.a,
            weights.ranks,
            *rows.tables,
            shrunk,
            len(rows.order),
            x.shape[1],
            weights.max_rank,
            shape.num_steps,
            PARTS=weights.num_parts,
            RANK=shrunk.shape[-1],
            COLUMNS=_columns(weights),
            ROWS=rows.tile_rows,
            DEPTH=shape.depth,
            EXACT=x.dtype is torch.float32,
            num_warps=4,
            num_stages=3,
        )


def _columns(weights: AdapterWeights) -> int:
    rank = held_rank(weights)
    columns: int = rank * triton.next_power_of_2(weights.num_parts)
    return columns if columns <= MAX_COLUMNS else rank


def _num_groups(weights: AdapterWeights) -> int:
    return -(-weights.num_parts * held_rank(weights) // _columns(weights))


@triton.jit(do_not_specialize=["num_rows", "num_steps"])
def _shrink(  # type: ignore[no-untyped-def]
    x,
    a,
    ranks,
    order,
    tile_slots,
    tile_begins,
    tile_ends,
    tile_count,
    out,
    num_rows,
    in_size,
    max_rank,
    num_steps,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXACT: tl.constexpr,
):
    """A block multiplies by the ranks of one part after another, COLUMNS in all."""
    split = tl.program_id(2)
    i, j, k = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    part, r = tl.program_id(1) * (COLUMNS // RANK) + j // RANK, j % RANK
    has_part = part < PARTS
    first = split * num_steps * DEPTH
    for tile in range(tl.program_id(0), tl.load(tile_count), tl.num_programs(0)):
        matrix = tl.load(tile_slots + tile) * PARTS + part
        places = tl.load(tile_begins + tile) + i
        has_row = places < tl.load(tile_ends + tile)
        rank = tl.load(ranks + matrix, mask=has_part, other=0)
        rows = tl.load(order + places, mask=has_row, other=0)
        if tl.max(rank, 0) > 0:
            has_rank = r < rank
            x_rows = x + rows.to(tl.int64) * in_size
            a_rows = a + (matrix.to(tl.int64) * max_rank + r) * in_size
            sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for step in range(num_steps):
                columns = first + step * DEPTH + k
                has_column = columns < in_size
                mask = has_row[:, None] & has_column[None, :]
                inputs = tl.load(x_rows[:, None] + columns[None, :], mask=mask, other=0.0)
                mask = has_rank[None, :] & has_column[:, None]
                factors = tl.load(a_rows[None, :] + columns[:, None], mask=mask, other=0.0)
                if EXACT:
                    sums = tl.dot(inputs, factors, sums, input_precision="ieee")
                else:
                    sums = tl.dot(inputs, factors, sums)
            numbers = (split * PARTS + part)[None, :].to(tl.int64) * num_rows + rows[:, None]
            tl.store(out + numbers * RANK + r[None, :], sums, mask=has_row[:, None] & has_part[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _expand(  # type: ignore[no-untyped-def]
    shrunk,
    b,
    ranks,
    order,
    tile_slots,
    tile_begins,
    tile_ends,
    tile_count,
    out,
    num_rows,
    end_0,
    end_1,
    end_2,
    row_size,
    max_rank,
    NUM_SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Part p's outputs end at end_p in a row."""
    output_tile, part = tl.program_id(1), tl.program_id(2)
    begin = tl.where(part == 0, 0, tl.where(part == 1, end_0, end_1))
    end = tl.where(part == 0, end_0, tl.where(part == 1, end_1, end_2))
    num_outputs = end - begin
    if output_tile * OUTPUTS >= num_outputs:
        return
    i = tl.arange(0, ROWS)
    outputs = output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    has_output = outputs < num_outputs
    for tile in range(tl.program_id(0), tl.load(tile_count), tl.num_programs(0)):
        slot = tl.load(tile_slots + tile)
        places = tl.load(tile_begins + tile) + i
        has_row = places < tl.load(tile_ends + tile)
        rank = tl.load(ranks + slot * PARTS + part)
        rows = tl.load(order + places, mask=has_row, other=0)
        if rank > 0:
            matrix = b + slot.to(tl.int64) * max_rank * row_size + begin.to(tl.int64) * max_rank
            into = out + rows.to(tl.int64)[:, None] * row_size + begin + outputs[None, :]
            mask = has_row[:, None] & has_output[None, :]
            before = tl.load(into, mask=mask, other=0.0)
            product = _expanded(
                shrunk, matrix, part, PARTS, rank, rows, has_row, num_rows, outputs, has_output, num_outputs,
                NUM_SPLITS, RANK, ROWS, EXACT,
            )  # fmt: skip
            tl.store(into, (product + before.to(tl.float32)).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _expand_gated(  # type: ignore[no-untyped-def]
    shrunk,
    b,
    ranks,
    order,
    tile_slots,
    tile_begins,
    tile_ends,
    tile_counts,
    projected,
    out,
    num_rows,
    size,
    max_rank,
    NUM_SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EXACT: tl.constexpr,
):
    i = tl.arange(0, ROWS)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    has_output = outputs < size
    for tile in range(tl.program_id(0), tl.load(tile_counts + 1), tl.num_programs(0)):
        slot = tl.load(tile_slots + tile)
        places = tl.load(tile_begins + tile) + i
        has_row = places < tl.load(tile_ends + tile)
        rows = tl.load(order + places, mask=has_row, other=0).to(tl.int64)
        mask = has_row[:, None] & has_output[None, :]
        places_in = projected + rows[:, None] * 2 * size + outputs[None, :]
        gate = tl.load(places_in, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(places_in + size, mask=mask, other=0.0).to(tl.float32)
        if slot >= 0:
            matrix = b + slot.to(tl.int64) * max_rank * 2 * size
            rank = tl.load(ranks + slot * 2)
            if rank > 0:
                gate += _expanded(
                    shrunk, matrix, 0, 2, rank, rows, has_row, num_rows, outputs, has_output, size, NUM_SPLITS, RANK,
                    ROWS, EXACT,
                )  # fmt: skip
            rank = tl.load(ranks + slot * 2 + 1)
            if rank > 0:
                matrix += size.to(tl.int64) * max_rank
                up += _expanded(
                    shrunk, matrix, 1, 2, rank, rows, has_row, num_rows, outputs, has_output, size, NUM_SPLITS, RANK,
                    ROWS, EXACT,
                )  # fmt: skip
        gated = gate / (1 + tl.exp(-gate)) * up
        tl.store(out + rows[:, None] * size + outputs[None, :], gated.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _expanded(  # type: ignore[no-untyped-def]
    shrunk,
    matrix,
    part,
    num_parts,
    rank,
    rows,
    has_row,
    num_rows,
    outputs,
    has_output,
    num_outputs,
    NUM_SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Returns a tile's product with B, (ROWS, OUTPUTS) float32."""
    r = tl.arange(0, RANK)
    mask = (r < rank)[:, None] & has_output[None, :]
    factors = tl.load(matrix + r[:, None] * num_outputs + outputs[None, :], mask=mask, other=0.0)
    sums = tl.zeros((ROWS, RANK), dtype=tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        numbers = rows.to(tl.int64) + (split * num_parts + part) * num_rows
        sums += tl.load(shrunk + numbers[:, None] * RANK + r[None, :], mask=has_row[:, None], other=0.0)
    if EXACT:
        product = tl.dot(sums, factors, input_precision="ieee")
    else:
        product = tl.dot(sums.to(factors.dtype), factors)
    return product
