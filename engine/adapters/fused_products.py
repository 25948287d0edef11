"""Products of a base model's matrix and of the adapters of its rows in one kernel, for few rows. Needs CUDA.

Some blocks multiply rows by A while the others multiply them by the matrix. These add the product with B to their sums
before they write them.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.engine.adapters.rows import AdapterRows
from tandem.engine.adapters.weights import AdapterWeights
from tandem.engine.layers.linear import Linear, LinearBase

# Other GPUs, and those of fewer multiprocessors than MIN_BLOCKS, have too little shared memory or too few blocks side
# by side for these shapes.
CAPABILITY = 9
# Rows of a tile of the base's product.
FEW_ROWS, MANY_ROWS = 64, 128
# More inputs are shared between blocks, and so are those of few outputs, up to so many blocks.
MAX_UNSPLIT_INPUTS, MIN_BLOCKS = 8192, 64
# Bytes of shared memory not used for steps.
RESERVED = 2048
# Inputs of a step of the product with A.
DEPTH = 128
# Steps of it in flight, and their bytes: no more than the base's product has.
MAX_SHRINK_STAGES, SHRINK_BYTES = 8, 2**16
# Groups of adapters in flight.
EXPAND_STAGES = tl.constexpr(4)
# Blocks that share a product with A.
MAX_SPLITS = tl.constexpr(16)
# Ranks of some adapters side by side, at least.
MIN_FACTORS = 64
# Launches of one forward pass.
MAX_LAUNCHES = 1024
# Products with A that blocks share.
MAX_SHARED = 4096
# Up to so many adapters, their B is requested before the kernels before have ended.
MAX_PREFETCHED = tl.constexpr(8)
LINE = tl.constexpr(128)
# Bytes of each row of the matrix that are requested then.
PREFETCH = tl.constexpr(512)


class Shape(NamedTuple):
    """Work of one block.

    Attributes:
        rows, outputs, depth, num_splits: of the base's product. Gated: twice as many outputs.
        num_shrinkers: blocks that only multiply by A.
    """

    rows: int
    outputs: int
    depth: int
    num_stages: int
    num_warps: int
    num_splits: int
    num_shrinkers: int


class FusedProducts:
    """The kernel and its memory, for one stream at a time. A forward pass calls `begin` first."""

    def __init__(self, device: torch.device) -> None:
        properties: Any = torch.cuda.get_device_properties(device)
        self._num_multiprocessors = properties.multi_processor_count
        self._shared_memory = properties.shared_memory_per_block_optin
        is_measured = torch.cuda.get_device_capability(device)[0] == CAPABILITY
        self._has_kernel = is_measured and self._num_multiprocessors >= MIN_BLOCKS
        # Of each launch of a pass: products with A that blocks have taken, those that are there, and room that keeps
        # each at a multiple of 16 bytes.
        self._progress = torch.zeros(MAX_LAUNCHES, 4, dtype=torch.int32, device=device)
        self._num_launches = 0
        # Finished blocks of each shared product; zero between launches.
        self._shared = torch.zeros(MAX_SHARED, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(self._num_multiprocessors, dtype=torch.int32, device=device)

    def begin(self) -> None:
        self._progress.zero_()
        self._num_launches = 0

    def shape(
        self, num_rows: int, linear: LinearBase, weights: AdapterWeights, *, is_gated: bool = False
    ) -> Shape | None:
        """Returns None if the kernel does not compute this."""
        if not self._has_kernel or not isinstance(linear, Linear) or linear.weight.dtype is not torch.bfloat16:
            return None
        if not num_rows or (linear.bias is not None and is_gated):
            return None
        out_size, num_factors = sum(weights.out_sizes), 2 if is_gated else 1
        shape = shape_for(
            num_rows, out_size // num_factors, weights.a.shape[-1], self._num_multiprocessors, is_gated=is_gated
        )
        if shape is None or any(first % shape.outputs for first in weights.firsts):
            return None
        num_bytes = 2 * shape.num_stages * shape.depth * (shape.rows + num_factors * shape.outputs)
        return shape if num_bytes <= self._shared_memory - RESERVED else None

    def multiply(
        self,
        x: torch.Tensor,
        linear: LinearBase,
        weights: AdapterWeights,
        rows: AdapterRows,
        shape: Shape,
        residual: torch.Tensor | None = None,
        *,
        is_gated: bool = False,
    ) -> torch.Tensor:
        """Returns the projections of x with adapters, (num_rows, out_size) bfloat16; adds them to `residual` in place
        if given.

        Args:
            x: (num_rows, in_size) bfloat16, contiguous.
            shape: of `shape`.
            is_gated: return silu(first half of the projections) * second half: (num_rows, out_size / 2).
        """
        assert x.is_contiguous() and (residual is None or residual.is_contiguous())
        assert self._num_launches < MAX_LAUNCHES
        num_rows, in_size = x.shape
        num_parts, num_outputs = weights.num_parts, sum(weights.out_sizes)
        out_size = num_outputs // 2 if is_gated else num_outputs
        rank = max(16, triton.next_power_of_2(weights.max_rank))
        out = residual
        if out is None:
            out = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
        row_tiles, output_tiles = triton.cdiv(num_rows, shape.rows), out_size // shape.outputs
        sums = out
        if shape.num_splits > 1:
            num_sums = row_tiles * output_tiles * shape.num_splits * shape.rows * shape.outputs
            sums = torch.empty(num_sums, dtype=torch.float32, device=x.device)
            assert row_tiles * output_tiles <= len(self._arrived)
        most_products = len(rows.tile_slots) * num_parts
        assert most_products <= MAX_SHARED
        num_shares = max(most_products, shape.num_shrinkers)
        shares = torch.empty(num_shares * rows.tile_rows * rank, dtype=torch.float32, device=x.device)
        shrunk = torch.empty(num_parts, num_rows, rank, dtype=x.dtype, device=x.device)
        firsts = (*weights.firsts, num_outputs, num_outputs)
        launch: Any = _multiply[shape.num_shrinkers + row_tiles * output_tiles * shape.num_splits,]
        launch(
            x,
            linear.weight,
            linear.bias if linear.bias is not None else out,
            weights.a,
            weights.b,
            weights.ranks,
            *rows.tables,
            rows.row_slots,
            rows.adapter_slots,
            shrunk,
            shares,
            self._shared,
            self._progress[self._num_launches],
            out,
            sums,
            self._arrived,
            num_rows,
            out_size,
            num_outputs,
            in_size,
            in_size // (shape.depth * shape.num_splits),
            shape.num_splits,
            shape.num_shrinkers,
            weights.max_rank,
            *firsts[1:3],
            ROWS=shape.rows,
            OUTPUTS=shape.outputs,
            DEPTH=shape.depth,
            PARTS=num_parts,
            RANK=rank,
            TILE_ROWS=rows.tile_rows,
            SHRINK_DEPTH=DEPTH,
            SHRINK_STAGES=max(2, min(MAX_SHRINK_STAGES, SHRINK_BYTES // (2 * DEPTH * (rows.tile_rows + rank)))),
            GROUP=max(1, MIN_FACTORS // rank),
            IS_SPLIT=shape.num_splits > 1,
            GATED=is_gated,
            HAS_BIAS=linear.bias is not None,
            ADDS=residual is not None,
            DEPENDENT=self._has_kernel,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
            launch_pdl=self._has_kernel,
        )
        self._num_launches += 1
        return out


def shape_for(num_rows: int, out_size: int, in_size: int, num_multiprocessors: int, *, is_gated: bool) -> Shape | None:
    """Returns None where the library's product and two kernels of adapters are faster, or sizes do not fit.

    Measured on an H200 with the matrices of an 8B model, at 32 and 128 rows.

    Args:
        out_size: a gated output's two factors count as one.
    """
    if is_gated:
        shape = Shape(FEW_ROWS, 64, 64, 4, 4, 1, 32)
        if num_rows > FEW_ROWS:
            shape = Shape(MANY_ROWS, 128, 64, 4, 8, 1, 20)
        fits = num_rows <= MANY_ROWS and 2 * (out_size // shape.outputs) >= num_multiprocessors
        return shape if fits and in_size % DEPTH == 0 else None
    if num_rows > FEW_ROWS or in_size % DEPTH:
        return None
    shape = Shape(FEW_ROWS, 64, 64, 12, 4, 1, 32)
    num_tiles = out_size // shape.outputs
    while True:
        num_splits = 2 * shape.num_splits
        is_long = in_size // shape.num_splits > MAX_UNSPLIT_INPUTS and num_tiles * num_splits <= num_multiprocessors
        if in_size % (shape.depth * num_splits) or not (num_tiles * num_splits <= MIN_BLOCKS or is_long):
            return shape
        shape = shape._replace(num_splits=num_splits, num_shrinkers=100 if is_long else shape.num_shrinkers)


@triton.jit(do_not_specialize=["num_rows", "num_steps", "num_splits", "num_shrinkers", "max_rank"])
def _multiply(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    a,
    b,
    ranks,
    order,
    tile_slots,
    tile_begins,
    tile_ends,
    num_tiles,
    row_slots,
    adapter_slots,
    shrunk,
    shares,
    shared,
    progress,
    out,
    partials,
    arrived,
    num_rows,
    out_size,
    num_outputs,
    in_size,
    num_steps,
    num_splits,
    num_shrinkers,
    max_rank,
    end_0,
    end_1,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SHRINK_DEPTH: tl.constexpr,
    SHRINK_STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Part p's outputs end at end_p in a row. A tile of outputs lies in one part."""
    if DEPENDENT:
        gdc_launch_dependents()
    num_products = tl.load(num_tiles) * PARTS
    if tl.program_id(0) < num_shrinkers:
        if DEPENDENT:
            gdc_wait()
        _shrink_all(
            x, a, ranks, order, tile_slots, tile_begins, tile_ends, num_products, shrunk, shares, shared, progress,
            num_rows, in_size, num_shrinkers, max_rank, PARTS, RANK, TILE_ROWS, SHRINK_DEPTH, SHRINK_STAGES,
        )  # fmt: skip
    else:
        block = tl.program_id(0) - num_shrinkers
        num_row_tiles, num_output_tiles = tl.cdiv(num_rows, ROWS), out_size // OUTPUTS
        row_tile = block % num_row_tiles
        output_tile = block // num_row_tiles % num_output_tiles
        split = block // (num_row_tiles * num_output_tiles)
        i, j, k = tl.arange(0, ROWS), tl.arange(0, OUTPUTS), tl.arange(0, DEPTH)
        rows = row_tile * ROWS + i
        first_output = output_tile * OUTPUTS
        outputs = first_output + j
        has_row = rows < num_rows
        first = split * num_steps * DEPTH
        num_adapters = tl.load(num_tiles + 2)
        part, part_size = 0, num_outputs
        # Of an adapter's part, at this tile's first output.
        factors = b + first_output
        if GATED:
            part_size = out_size
        elif PARTS > 1:
            part = (first_output >= end_0).to(tl.int32) + (first_output >= end_1).to(tl.int32)
            begin = tl.where(part == 0, 0, tl.where(part == 1, end_0, end_1))
            part_size = tl.where(part == 0, end_0, tl.where(part == 1, end_1, num_outputs)) - begin
            factors += begin.to(tl.int64) * (max_rank - 1)
        slot_size = max_rank.to(tl.int64) * num_outputs
        if DEPENDENT:
            _prefetch(weight, outputs, first, in_size, num_steps * DEPTH)
            if GATED:
                _prefetch(weight, out_size + outputs, first, in_size, num_steps * DEPTH)
            if num_adapters <= MAX_PREFETCHED:
                for adapter in range(num_adapters):
                    slot = tl.load(adapter_slots + adapter)
                    _prefetch_factors(factors + slot * slot_size, max_rank, part_size, RANK, OUTPUTS)
                    if GATED:
                        ups_of = factors + slot * slot_size + max_rank.to(tl.int64) * out_size
                        _prefetch_factors(ups_of, max_rank, part_size, RANK, OUTPUTS)
            gdc_wait()
        x_rows = x + rows[:, None].to(tl.int64) * in_size + (first + k)[None, :]
        columns = weight + outputs[None, :].to(tl.int64) * in_size + (first + k)[:, None]
        up_columns = columns + out_size.to(tl.int64) * in_size
        sums = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
        ups = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
        for step in range(num_steps):
            inputs = tl.load(x_rows + step * DEPTH, mask=has_row[:, None], other=0.0)
            sums = tl.dot(inputs, tl.load(columns + step * DEPTH), sums)
            if GATED:
                ups = tl.dot(inputs, tl.load(up_columns + step * DEPTH), ups)
        is_last = True
        if IS_SPLIT:
            tile = row_tile * num_output_tiles + output_tile
            parts = partials + tile.to(tl.int64) * num_splits * ROWS * OUTPUTS + i[:, None] * OUTPUTS + j[None, :]
            tl.store(parts + split * ROWS * OUTPUTS, sums, mask=has_row[:, None])
            tl.debug_barrier()
            # Makes the other blocks' partial sums visible.
            is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == num_splits - 1
        if is_last:
            if IS_SPLIT:
                # In a fixed order: the same inputs give the same bits.
                sums = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
                for s in range(num_splits):
                    share = parts + s * ROWS * OUTPUTS
                    sums += tl.load(share, mask=has_row[:, None], other=0.0, cache_modifier=".cg")
                tl.store(arrived + tile, 0)
            if num_products > 0:
                if tl.atomic_add(progress + 1, 0, sem="acquire", scope="gpu") < num_products:
                    # Nobody waits for a block that has not begun: whoever waits has taken what was left.
                    _shrink_all(
                        x, a, ranks, order, tile_slots, tile_begins, tile_ends, num_products, shrunk, shares, shared,
                        progress, num_rows, in_size, num_shrinkers, max_rank, PARTS, RANK, TILE_ROWS, SHRINK_DEPTH,
                        SHRINK_STAGES,
                    )  # fmt: skip
                    while tl.atomic_add(progress + 1, 0, sem="acquire", scope="gpu") < num_products:
                        pass
                slots = tl.load(row_slots + rows, mask=has_row, other=-1)
                g, r, f = tl.arange(0, GROUP), tl.arange(0, RANK), tl.arange(0, GROUP * RANK)
                of_rows = shrunk + (part * num_rows + rows)[:, None] * RANK + r[None, :]
                own = tl.load(of_rows, mask=(slots >= 0)[:, None], other=0.0, cache_modifier=".cg")
                own_up = own
                if GATED:
                    of_rows += num_rows * RANK
                    own_up = tl.load(of_rows, mask=(slots >= 0)[:, None], other=0.0, cache_modifier=".cg")
                for group in tl.range(0, tl.cdiv(num_adapters, GROUP), num_stages=EXPAND_STAGES):
                    adapters = group * GROUP + f // RANK
                    is_used = (adapters < num_adapters) & (f % RANK < max_rank)
                    of_factors = tl.load(adapter_slots + adapters, mask=is_used, other=0)
                    places = of_factors.to(tl.int64) * slot_size + (f % RANK) * part_size
                    matrix = tl.load(factors + places[:, None] + j[None, :], mask=is_used[:, None], other=0.0)
                    adapters = group * GROUP + g
                    of_group = tl.load(adapter_slots + adapters, mask=adapters < num_adapters, other=-2)
                    is_own = slots[:, None] == of_group[None, :]
                    sums = tl.dot(_spread(own, is_own, ROWS, GROUP, RANK), matrix, sums)
                    if GATED:
                        places += max_rank.to(tl.int64) * out_size
                        matrix = tl.load(factors + places[:, None] + j[None, :], mask=is_used[:, None], other=0.0)
                        ups = tl.dot(_spread(own_up, is_own, ROWS, GROUP, RANK), matrix, ups)
            if HAS_BIAS:
                sums += tl.load(bias + outputs)[None, :].to(tl.float32)
            if GATED:
                sums = sums / (1 + tl.exp(-sums)) * ups
            into = out + rows[:, None].to(tl.int64) * out_size + outputs[None, :]
            if ADDS:
                sums += tl.load(into, mask=has_row[:, None], other=0.0).to(tl.float32)
            tl.store(into, sums.to(out.dtype.element_ty), mask=has_row[:, None])


@triton.jit
def _shrink_all(  # type: ignore[no-untyped-def]
    x,
    a,
    ranks,
    order,
    tile_slots,
    tile_begins,
    tile_ends,
    num_products,
    shrunk,
    shares,
    shared,
    progress,
    num_rows,
    in_size,
    num_blocks,
    max_rank,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Takes products with A, or shares of them, until all are taken."""
    num_splits = tl.minimum(tl.maximum(num_blocks // tl.maximum(num_products, 1), 1), MAX_SPLITS)
    all_steps = in_size // DEPTH
    most_steps = tl.cdiv(all_steps, num_splits)
    i, r, k = tl.arange(0, ROWS), tl.arange(0, RANK), tl.arange(0, DEPTH)
    item = tl.atomic_add(progress, 1, sem="relaxed", scope="gpu")
    while item < num_products * num_splits:
        product, split = item // num_splits, item % num_splits
        tile, part = product // PARTS, product % PARTS
        matrix = tl.load(tile_slots + tile) * PARTS + part
        places = tl.load(tile_begins + tile) + i
        has_row = places < tl.load(tile_ends + tile)
        has_rank = r < tl.load(ranks + matrix)
        rows = tl.load(order + places, mask=has_row, other=0)
        first = split * most_steps
        x_rows = x + rows.to(tl.int64)[:, None] * in_size + (first * DEPTH + k)[None, :]
        a_rows = a + (matrix.to(tl.int64) * max_rank + r)[None, :] * in_size + (first * DEPTH + k)[:, None]
        sums = tl.zeros((ROWS, RANK), dtype=tl.float32)
        for step in tl.range(0, tl.minimum(most_steps, all_steps - first), num_stages=STAGES):
            inputs = tl.load(x_rows + step * DEPTH, mask=has_row[:, None], other=0.0)
            sums = tl.dot(inputs, tl.load(a_rows + step * DEPTH, mask=has_rank[None, :], other=0.0), sums)
        is_last = num_splits == 1
        if num_splits > 1:
            share = shares + product.to(tl.int64) * num_splits * ROWS * RANK + i[:, None] * RANK + r[None, :]
            tl.store(share + split * ROWS * RANK, sums)
            tl.debug_barrier()
            is_last = tl.atomic_add(shared + product, 1, sem="acq_rel", scope="gpu") == num_splits - 1
            if is_last:
                sums = tl.zeros((ROWS, RANK), dtype=tl.float32)
                for s in tl.static_range(MAX_SPLITS):
                    sums += tl.load(share + s * ROWS * RANK, mask=s < num_splits, other=0.0, cache_modifier=".cg")
                tl.store(shared + product, 0)
        if is_last:
            into = shrunk + (part * num_rows + rows)[:, None] * RANK + r[None, :]
            tl.store(into, sums.to(shrunk.dtype.element_ty), mask=has_row[:, None])
            tl.debug_barrier()
            tl.atomic_add(progress + 1, 1, sem="release", scope="gpu")
        item = tl.atomic_add(progress, 1, sem="relaxed", scope="gpu")


@triton.jit
def _spread(own, is_own, ROWS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns each row's factors in the place of its own adapter, and zeros: (ROWS, GROUP * RANK)."""
    spread = tl.where(is_own[:, :, None], own[:, None, :], 0.0)
    return spread.reshape(ROWS, GROUP * RANK).to(own.dtype)


@triton.jit
def _prefetch(weight, rows, first, in_size, num_inputs):  # type: ignore[no-untyped-def]
    lines = tl.minimum(tl.arange(0, PREFETCH // LINE) * LINE, num_inputs * 2 - LINE)
    begin = weight.to(tl.int64) + (rows[:, None].to(tl.int64) * in_size + first) * 2
    _request(begin + lines[None, :])


@triton.jit
def _prefetch_factors(factors, max_rank, part_size, RANK: tl.constexpr, OUTPUTS: tl.constexpr):  # type: ignore[no-untyped-def]
    r = tl.minimum(tl.arange(0, RANK), max_rank - 1)
    lines = tl.arange(0, OUTPUTS * 2 // LINE) * LINE
    _request(factors.to(tl.int64) + r[:, None].to(tl.int64) * part_size * 2 + lines[None, :])


@triton.jit
def _request(addresses):  # type: ignore[no-untyped-def]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )
