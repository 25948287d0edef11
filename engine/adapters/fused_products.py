"""Gated products of a base model's matrix and of the adapters of its rows in one kernel, for few rows. Needs CUDA.

Some blocks multiply rows by A while the others multiply them by the matrix. These add the product with B to their sums
before they gate and write them.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.engine.adapters.rows import AdapterRows
from tandem.engine.adapters.weights import AdapterWeights
from tandem.engine.layers.linear import Linear, LinearBase

# Up to so many rows, the base's kernels of few rows are faster, with the adapters' behind them.
MAX_SEPARATE_ROWS = 16
# Other GPUs have too little shared memory, or too few blocks side by side, for these shapes.
CAPABILITY, MIN_MULTIPROCESSORS = 9, 64
# Rows of a tile of the base's product.
FEW_ROWS, MANY_ROWS = 64, 128
# Gate and up.
PARTS = tl.constexpr(2)
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
        rows, outputs, depth: of the base's product; as many outputs of gate and of up.
        num_shrinkers: blocks that only multiply by A.
    """

    rows: int
    outputs: int
    depth: int
    num_stages: int
    num_warps: int
    num_shrinkers: int


class FusedProducts:
    """The kernel and its memory, for one stream at a time. A forward pass calls `begin` first."""

    def __init__(self, device: torch.device) -> None:
        properties: Any = torch.cuda.get_device_properties(device)
        self._num_multiprocessors = properties.multi_processor_count
        self._shared_memory = properties.shared_memory_per_block_optin
        is_measured = torch.cuda.get_device_capability(device)[0] == CAPABILITY
        self._has_kernel = is_measured and self._num_multiprocessors >= MIN_MULTIPROCESSORS
        # Of each launch of a pass: products with A that blocks have taken, those that are there, and room that keeps
        # each at a multiple of 16 bytes.
        self._progress = torch.zeros(MAX_LAUNCHES, 4, dtype=torch.int32, device=device)
        self._num_launches = 0
        # Finished blocks of each shared product; zero between launches.
        self._shared = torch.zeros(MAX_SHARED, dtype=torch.int32, device=device)

    def begin(self) -> None:
        self._progress.zero_()
        self._num_launches = 0

    def shape(self, num_rows: int, linear: LinearBase, weights: AdapterWeights) -> Shape | None:
        """Returns None if the kernel does not compute this."""
        if not self._has_kernel or not isinstance(linear, Linear) or linear.weight.dtype is not torch.bfloat16:
            return None
        if linear.bias is not None:
            return None
        shape = shape_for(num_rows, sum(weights.out_sizes) // 2, weights.a.shape[-1], self._num_multiprocessors)
        if shape is None or weights.firsts[1] % shape.outputs:
            return None
        num_bytes = 2 * shape.num_stages * shape.depth * (shape.rows + 2 * shape.outputs)
        return shape if num_bytes <= self._shared_memory - RESERVED else None

    def multiply(
        self, x: torch.Tensor, linear: LinearBase, weights: AdapterWeights, rows: AdapterRows, shape: Shape
    ) -> torch.Tensor:
        """Returns silu(first half of the projections of x with adapters) * second half, (num_rows, out_size) bfloat16.

        Args:
            x: (num_rows, in_size) bfloat16, contiguous.
            shape: of `shape`.
        """
        assert x.is_contiguous() and self._num_launches < MAX_LAUNCHES
        num_rows, in_size = x.shape
        out_size = sum(weights.out_sizes) // 2
        rank = max(16, triton.next_power_of_2(weights.max_rank))
        out = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
        row_tiles, output_tiles = triton.cdiv(num_rows, shape.rows), out_size // shape.outputs
        most_products = len(rows.tile_slots) * PARTS.value
        assert most_products <= MAX_SHARED
        num_shares = max(most_products, shape.num_shrinkers)
        shares = torch.empty(num_shares * rows.tile_rows * rank, dtype=torch.float32, device=x.device)
        shrunk = torch.empty(PARTS.value, num_rows, rank, dtype=x.dtype, device=x.device)
        launch: Any = _multiply[shape.num_shrinkers + row_tiles * output_tiles,]
        launch(
            x,
            linear.weight,
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
            num_rows,
            out_size,
            in_size,
            in_size // shape.depth,
            shape.num_shrinkers,
            weights.max_rank,
            ROWS=shape.rows,
            OUTPUTS=shape.outputs,
            DEPTH=shape.depth,
            RANK=rank,
            TILE_ROWS=rows.tile_rows,
            SHRINK_DEPTH=DEPTH,
            SHRINK_STAGES=max(2, min(MAX_SHRINK_STAGES, SHRINK_BYTES // (2 * DEPTH * (rows.tile_rows + rank)))),
            GROUP=max(1, MIN_FACTORS // rank),
            DEPENDENT=self._has_kernel,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
            launch_pdl=self._has_kernel,
        )
        self._num_launches += 1
        return out


def shape_for(num_rows: int, out_size: int, in_size: int, num_multiprocessors: int) -> Shape | None:
    """Returns None where other kernels are faster, or sizes do not fit.

    Measured on an H200 with the matrices of an 8B model, at 32 and 128 rows.

    Args:
        out_size: a gated output's two factors count as one.
    """
    shape = Shape(FEW_ROWS, 64, 64, 4, 4, 32)
    if num_rows > FEW_ROWS:
        shape = Shape(MANY_ROWS, 128, 64, 4, 8, 20)
    fits = MAX_SEPARATE_ROWS < num_rows <= MANY_ROWS and 2 * (out_size // shape.outputs) >= num_multiprocessors
    return shape if fits and in_size % DEPTH == 0 else None


@triton.jit(do_not_specialize=["num_rows", "num_steps", "num_shrinkers", "max_rank"])
def _multiply(  # type: ignore[no-untyped-def]
    x,
    weight,
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
    num_rows,
    out_size,
    in_size,
    num_steps,
    num_shrinkers,
    max_rank,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    RANK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SHRINK_DEPTH: tl.constexpr,
    SHRINK_STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
    num_products = tl.load(num_tiles) * PARTS
    if tl.program_id(0) < num_shrinkers:
        if DEPENDENT:
            gdc_wait()
        _shrink_all(
            x, a, ranks, order, tile_slots, tile_begins, tile_ends, num_products, shrunk, shares, shared, progress,
            num_rows, in_size, num_shrinkers, max_rank, RANK, TILE_ROWS, SHRINK_DEPTH, SHRINK_STAGES,
        )  # fmt: skip
    else:
        block = tl.program_id(0) - num_shrinkers
        num_row_tiles = tl.cdiv(num_rows, ROWS)
        row_tile, output_tile = block % num_row_tiles, block // num_row_tiles
        i, j, k = tl.arange(0, ROWS), tl.arange(0, OUTPUTS), tl.arange(0, DEPTH)
        rows = row_tile * ROWS + i
        first_output = output_tile * OUTPUTS
        outputs = first_output + j
        has_row = rows < num_rows
        num_adapters = tl.load(num_tiles + 2)
        # Of an adapter's gate, at this tile's first output.
        factors = b + first_output
        slot_size = max_rank.to(tl.int64) * 2 * out_size
        if DEPENDENT:
            _prefetch(weight, outputs, in_size)
            _prefetch(weight, out_size + outputs, in_size)
            if num_adapters <= MAX_PREFETCHED:
                for adapter in range(num_adapters):
                    slot = tl.load(adapter_slots + adapter)
                    _prefetch_factors(factors + slot * slot_size, max_rank, out_size, RANK, OUTPUTS)
                    ups_of = factors + slot * slot_size + max_rank.to(tl.int64) * out_size
                    _prefetch_factors(ups_of, max_rank, out_size, RANK, OUTPUTS)
            gdc_wait()
        x_rows = x + rows[:, None].to(tl.int64) * in_size + k[None, :]
        columns = weight + outputs[None, :].to(tl.int64) * in_size + k[:, None]
        up_columns = columns + out_size.to(tl.int64) * in_size
        gates = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
        ups = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
        for step in range(num_steps):
            inputs = tl.load(x_rows + step * DEPTH, mask=has_row[:, None], other=0.0)
            gates = tl.dot(inputs, tl.load(columns + step * DEPTH), gates)
            ups = tl.dot(inputs, tl.load(up_columns + step * DEPTH), ups)
        if num_products > 0:
            if tl.atomic_add(progress + 1, 0, sem="acquire", scope="gpu") < num_products:
                # Nobody waits for a block that has not begun: whoever waits has taken what was left.
                _shrink_all(
                    x, a, ranks, order, tile_slots, tile_begins, tile_ends, num_products, shrunk, shares, shared,
                    progress, num_rows, in_size, num_shrinkers, max_rank, RANK, TILE_ROWS, SHRINK_DEPTH, SHRINK_STAGES,
                )  # fmt: skip
                while tl.atomic_add(progress + 1, 0, sem="acquire", scope="gpu") < num_products:
                    pass
            slots = tl.load(row_slots + rows, mask=has_row, other=-1)
            g, r, f = tl.arange(0, GROUP), tl.arange(0, RANK), tl.arange(0, GROUP * RANK)
            of_rows = shrunk + rows[:, None] * RANK + r[None, :]
            own = tl.load(of_rows, mask=(slots >= 0)[:, None], other=0.0, cache_modifier=".cg")
            of_rows += num_rows * RANK
            own_up = tl.load(of_rows, mask=(slots >= 0)[:, None], other=0.0, cache_modifier=".cg")
            for group in tl.range(0, tl.cdiv(num_adapters, GROUP), num_stages=EXPAND_STAGES):
                adapters = group * GROUP + f // RANK
                is_used = (adapters < num_adapters) & (f % RANK < max_rank)
                of_factors = tl.load(adapter_slots + adapters, mask=is_used, other=0)
                places = of_factors.to(tl.int64) * slot_size + (f % RANK) * out_size
                matrix = tl.load(factors + places[:, None] + j[None, :], mask=is_used[:, None], other=0.0)
                adapters = group * GROUP + g
                of_group = tl.load(adapter_slots + adapters, mask=adapters < num_adapters, other=-2)
                is_own = slots[:, None] == of_group[None, :]
                gates = tl.dot(_spread(own, is_own, ROWS, GROUP, RANK), matrix, gates)
                places += max_rank.to(tl.int64) * out_size
                matrix = tl.load(factors + places[:, None] + j[None, :], mask=is_used[:, None], other=0.0)
                ups = tl.dot(_spread(own_up, is_own, ROWS, GROUP, RANK), matrix, ups)
        gated = gates / (1 + tl.exp(-gates)) * ups
        into = out + rows[:, None].to(tl.int64) * out_size + outputs[None, :]
        tl.store(into, gated.to(out.dtype.element_ty), mask=has_row[:, None])


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
def _prefetch(weight, rows, in_size):  # type: ignore[no-untyped-def]
    lines = tl.minimum(tl.arange(0, PREFETCH // LINE) * LINE, in_size * 2 - LINE)
    _request(weight.to(tl.int64) + rows[:, None].to(tl.int64) * in_size * 2 + lines[None, :])


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
