"""Times the products of a layer's matrices by every available kernel. Importing it requires CUDA.

Tiles are named tokens/outputs/depth/stages/warps/splits.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import flashinfer
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kernels.layers import LayerKernels
from benchmarks.kernels.stages import has_dense_layers
from tandem.engine.floors import BYTES_PER_NUMBER, FP8_BYTES_PER_NUMBER, FP8_SPEED, Limits
from tandem.engine.layers.few_rows import FewRows
from tandem.engine.layers.fp8_linear import Fp8Linear
from tandem.engine.layers.fp8_products import multiply_by_library
from tandem.engine.layers.fp8_quantize import Quantized, quantize
from tandem.engine.layers.linear import LinearBase
from tandem.engine.layers.product_tiles import (
    FEW_TOKENS,
    MANY_TOKENS,
    MAX_SPLIT_TILE,
    Device,
    Product,
    Tile,
    divides,
    max_stages,
    num_tiles,
)
from tandem.engine.layers.products import Products, product_of
from tandem.engine.models.config import ModelConfig

# Minimum size of all matrices together, so that no cache holds them.
MIN_BYTES = 2**28
# Candidate tiles: outputs, bytes of a row per step, blocks per multiprocessor, and blocks that share a tile.
OUTPUTS, STEP_BYTES, BLOCKS_PER_SM, SPLITS = (64, 128), (128, 256), (1, 2), (1, 2, 4)
BLOCK_OUTPUTS = (32, 64, 128)
MAX_STAGES = 8
MAX_OWN_TOKENS = 512

NUM_SHOWN = 4


class Row(NamedTuple):
    """Attributes: floor: microseconds for the weights' bytes or the operations; times: microseconds by kernel."""

    matrix: str
    num_tokens: int
    floor: float
    times: dict[str, float]


class ProductKernels:
    """Times the matrices of attention and of a dense MLP, in bfloat16 or FP8 as configured by the model."""

    def __init__(self, model: ModelConfig, limits: Limits) -> None:
        self._layers = LayerKernels(model, limits)
        self._limits = limits
        self._is_fp8 = model.quantization is not None
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._few_rows = FewRows(self._device)
        self._products = Products(self._device)
        q_size, kv_size = model.num_q_heads * model.head_dim, model.num_kv_heads * model.head_dim
        self._shapes = {
            "qkv": (q_size + 2 * kv_size, model.hidden_size),
            "o": (model.hidden_size, q_size),
        }
        if has_dense_layers(model):
            self._shapes["gate_up"] = (2 * model.intermediate_size, model.hidden_size)
            self._shapes["down"] = (model.hidden_size, model.intermediate_size)

    def products(self, num_tokens: int) -> Iterator[Row]:
        """Time the library, and our own kernel with the chosen tile and the fastest tiles.

        Times include the gate's product of "gate_up" (except with block scales) and the residual sum of "o" and "down",
        but not quantizing.
        """
        for name in self._shapes:
            yield self._row(name, num_tokens)

    def _row(self, name: str, num_tokens: int) -> Row:
        num_out, num_in = self._shapes[name]
        rate = (FP8_SPEED if self._is_fp8 else 1) * self._limits.matmul_rate
        num_bytes = num_out * num_in * (FP8_BYTES_PER_NUMBER if self._is_fp8 else BYTES_PER_NUMBER)
        floor = max(num_bytes / self._limits.copy_bandwidth, 2 * num_out * num_in * num_tokens / rate) * 1e6
        linears = [self._layers.linear(num_out, num_in) for _ in range(max(2, -(-MIN_BYTES // num_bytes)))]
        return Row(name, num_tokens, floor, self._times(name, num_tokens, linears))

    def _times(self, name: str, num_tokens: int, linears: list[LinearBase]) -> dict[str, float]:
        x = torch.randn(num_tokens, self._shapes[name][1], device=self._device).bfloat16()
        residual = self._residual(name, num_tokens)
        inputs: torch.Tensor | Quantized = x
        times = {}
        first = linears[0]
        if isinstance(first, Fp8Linear):
            inputs = quantize(x, first)
            times["quantize"] = self._time(linears, lambda w: quantize(x, first))
        # Our own kernel does not gate with block scales.
        is_gated = name == "gate_up" and not (isinstance(first, Fp8Linear) and first.is_block)
        times["library"] = self._time(linears, lambda w: _by_library(inputs, w, residual, is_gated=is_gated))

        def own(tile: Tile) -> float:
            return self._time(linears, lambda w: self._products.multiply(inputs, w, tile, residual, is_gated=is_gated))

        if num_tokens <= MAX_OWN_TOKENS:
            chosen = self._products.tile(num_tokens, first, is_gated=is_gated)
            if chosen is not None:
                times[f"own, chosen {_name(chosen)}"] = own(chosen)
            product = product_of(num_tokens, first, is_gated=is_gated)
            by_tile = {_name(tile): own(tile) for tile in _tiles(product, self._products.device)}
            times |= dict(sorted(by_tile.items(), key=lambda item: item[1])[:NUM_SHOWN])
        if residual is not None and self._few_rows.fits(x, first):
            times["few rows"] = self._time(linears, lambda w: self._few_rows.linear_add(x, w, residual))
        return times

    def _residual(self, name: str, num_tokens: int) -> torch.Tensor | None:
        if name not in ("o", "down"):
            return None
        return torch.zeros(num_tokens, self._shapes[name][0], device=self._device).bfloat16()

    def _time(self, linears: Sequence[LinearBase], run: Callable[[LinearBase], object]) -> float:
        return self._layers.time(lambda: [run(linear) for linear in linears], len(linears))


def show(rows: Sequence[Row], title: str, console: Console) -> None:
    table = Table("matrix", title=title)
    for column in ("tokens", "floor", "kernels"):
        table.add_column(column, justify="left" if column == "kernels" else "right")
    for row in rows:
        times = ", ".join(f"{kernel} {time:.1f}" for kernel, time in row.times.items())
        table.add_row(row.matrix, str(row.num_tokens), f"{row.floor:.1f}", times)
    console.print(table)


def _by_library(
    x: torch.Tensor | Quantized, linear: LinearBase, residual: torch.Tensor | None, *, is_gated: bool
) -> torch.Tensor:
    if isinstance(x, Quantized):
        assert isinstance(linear, Fp8Linear)
        product = multiply_by_library(x, linear)
        if residual is not None:
            return residual.add_(product)
    elif residual is not None:
        return torch.addmm(residual, x, linear.weight.t(), out=residual)
    else:
        product = torch.mm(x, linear.weight.t())
    return flashinfer.activation.silu_and_mul(product) if is_gated else product


def _name(tile: Tile) -> str:
    return "/".join(map(str, tile))


def _tiles(product: Product, device: Device) -> Iterator[Tile]:
    tokens = FEW_TOKENS if product.num_tokens <= FEW_TOKENS else MANY_TOKENS
    is_block, bytes_per_number = product.kind == "block", 2 if product.kind == "plain" else 1
    seen = set()
    for outputs in BLOCK_OUTPUTS if is_block else OUTPUTS:
        columns = outputs * (2 if product.is_gated else 1)
        for depth in [size // bytes_per_number for size in (STEP_BYTES[:1] if is_block else STEP_BYTES)]:
            for num_blocks in BLOCKS_PER_SM:
                share = device._replace(shared_memory=device.shared_memory // num_blocks)
                # A thread holds at most 128 sums; more warps are tried only if each thread keeps at least 32.
                sums = tokens * columns // 32
                for num_warps in [n for n in (4, 8) if sums <= 128 * n and (n == 4 or sums >= 32 * n)]:
                    for num_splits in (1,) if is_block or product.is_gated else SPLITS:
                        tile = Tile(tokens, outputs, depth, 0, num_warps, num_splits)
                        tile = tile._replace(num_stages=min(MAX_STAGES, max_stages(tile, product, share)))
                        # Blocks that share tiles run as one wave, with limited memory for their sums.
                        num_sums = num_tiles(tile, product) * num_splits * max(tokens * outputs, MAX_SPLIT_TILE)
                        has_room = num_splits == 1 or num_sums <= device.num_multiprocessors * MAX_SPLIT_TILE
                        if divides(tile, product) and tile.num_stages > 1 and has_room:
                            seen.add(tile)
    yield from sorted(seen)
