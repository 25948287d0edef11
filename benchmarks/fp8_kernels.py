"""Products with FP8 weights by every kernel that there is for them. Imported on CUDA machines alone."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.layer_kernels import LayerKernels
from engine.floors import FP8_SPEED, Limits
from engine.layers.few_rows import FewRows, Tuning
from engine.layers.fp8_linear import Fp8Linear
from engine.layers.fp8_products import Tile, fits_own, multiply_by_library, multiply_by_own, tile_for
from engine.layers.fp8_quantize import Quantized, quantize
from engine.layers.norm import Norm
from engine.models.config import ModelConfig

# So many matrices are multiplied one after the other, at least: together they are larger than the cache.
MIN_BYTES = 2**28
OUTPUTS, WARPS, STAGES = (32, 64, 128), (4, 8), (3, 4, 6)
# Beyond so many tokens our own kernel is not tried.
MAX_OWN_TOKENS = 2048

# Of the kernel of few tokens: tiles of rows, warps, and stretches that are asked for ahead.
VARIANTS = (
    *((1, 16, 1), (1, 16, 2), (1, 8, 2), (1, 8, 4), (1, 4, 4)),
    *((2, 16, 1), (2, 16, 2), (2, 8, 1), (2, 8, 2), (2, 4, 2)),
    *((4, 16, 1), (4, 8, 1), (4, 4, 1)),
)
PREFETCHES = (0, 2048, 16384)
NUM_SHOWN = 4


class Row(NamedTuple):
    """Attributes: times: microseconds by kernel; floor: of the bytes of weights or the operations."""

    matrix: str
    num_tokens: int
    floor: float
    times: dict[str, float]


class Fp8Kernels:
    """The four matrices of a layer."""

    def __init__(self, model: ModelConfig, limits: Limits) -> None:
        self._layers = LayerKernels(model, limits.copy_bandwidth)
        self._limits = limits
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._properties = torch.cuda.get_device_properties(self._device)
        self._few_rows = FewRows(self._device)
        q_size, kv_size = model.num_q_heads * model.head_dim, model.num_kv_heads * model.head_dim
        self._eps = model.rms_norm_eps
        self._shapes = {
            "qkv": (q_size + 2 * kv_size, model.hidden_size),
            "o": (model.hidden_size, q_size),
            "gate_up": (2 * model.intermediate_size, model.hidden_size),
            "down": (model.hidden_size, model.intermediate_size),
        }

    def products(self, num_tokens: int) -> Iterator[Row]:
        """Library and our own kernel in the best of its tiles, without quantising; and what quantising takes."""
        for name in self._shapes:
            yield self._row(name, num_tokens, self._products_of)

    def tuning(self, num_tokens: int) -> Iterator[Row]:
        """The best variants of the kernel of few tokens, as each matrix uses it, and the one that is chosen."""
        for name in self._shapes:
            yield self._row(name, num_tokens, self._tuning_of)

    def _row(self, name: str, num_tokens: int, measure: Callable[[str, int, list[Fp8Linear]], dict[str, float]]) -> Row:
        num_out, num_in = self._shapes[name]
        computing = 2 * num_out * num_in * num_tokens / (FP8_SPEED * self._limits.matmul_rate)
        floor = max(num_out * num_in / self._limits.copy_bandwidth, computing) * 1e6
        # Together they are larger than the cache.
        linears = [self._layers.linear(num_out, num_in) for _ in range(max(2, -(-MIN_BYTES // (num_out * num_in))))]
        return Row(name, num_tokens, floor, measure(name, num_tokens, [w for w in linears if isinstance(w, Fp8Linear)]))

    def _products_of(self, name: str, num_tokens: int, linears: list[Fp8Linear]) -> dict[str, float]:
        num_out, num_in = self._shapes[name]
        x = torch.randn(num_tokens, num_in, device=self._device).bfloat16()
        residual = torch.zeros(num_tokens, num_out, device=self._device).bfloat16()
        quantized = quantize(x, linears[0])
        times = {
            "quantize": self._time(linears, lambda w: quantize(x, w)),
            "library": self._time(linears, lambda w: multiply_by_library(quantized, w)),
            "library and add": self._time(linears, lambda w: residual.add_(multiply_by_library(quantized, w))),
        }
        if num_tokens <= MAX_OWN_TOKENS and fits_own(linears[0]):
            by_tile = {tile: self._time_own(linears, quantized, tile, residual) for tile in _tiles(num_tokens)}
            chosen = tile_for(num_tokens, num_out, self._properties)
            best = min(by_tile, key=lambda tile: by_tile[tile])
            times["own and add"] = self._time_own(linears, quantized, chosen, residual)
            times[f"own and add, {'/'.join(map(str, best))}"] = by_tile[best]
        if self._few_rows.fits(x, linears[0]):
            times["few rows and add"] = self._time(linears, lambda w: self._few_rows.linear_add(x, w, residual))
        return times

    def _tuning_of(self, name: str, num_tokens: int, linears: list[Fp8Linear]) -> dict[str, float]:
        chosen = self._time_few_rows(name, num_tokens, linears, self._few_rows)
        times = {
            "/".join(map(str, tuning)): self._time_few_rows(name, num_tokens, linears, _Fixed(self._device, tuning))
            for tuning in _tunings(num_tokens)
        }
        return {"chosen": chosen, **dict(sorted(times.items(), key=lambda item: item[1])[:NUM_SHOWN])}

    def _time_own(self, linears: Sequence[Fp8Linear], x: Quantized, tile: Tile, residual: torch.Tensor) -> float:
        return self._time(linears, lambda w: multiply_by_own(x, w, tile, residual))

    def _time_few_rows(self, name: str, num_tokens: int, linears: Sequence[Fp8Linear], kernel: FewRows) -> float:
        num_out, num_in = self._shapes[name]
        x = torch.randn(num_tokens, num_in, device=self._device).bfloat16()
        if name in ("o", "down"):
            residual = torch.zeros(num_tokens, num_out, device=self._device).bfloat16()
            return self._time(linears, lambda w: kernel.linear_add(x, w, residual))
        norm = Norm(torch.ones(num_in, device=self._device).bfloat16(), self._eps)
        if name == "qkv":
            return self._time(linears, lambda w: kernel.norm_linear(x, norm, w, None))
        return self._time(linears, lambda w: kernel.norm_gated(x, norm, w))

    def _time(self, linears: Sequence[Fp8Linear], run: Callable[[Fp8Linear], object]) -> float:
        return self._layers.time(lambda: [run(linear) for linear in linears], len(linears))

    @staticmethod
    def show(rows: Sequence[Row], title: str, console: Console) -> None:
        table = Table("matrix", title=title)
        for column in ("tokens", "floor", "kernels"):
            table.add_column(column, justify="left" if column == "kernels" else "right")
        for row in rows:
            times = ", ".join(f"{kernel} {time:.1f}" for kernel, time in row.times.items())
            table.add_row(row.matrix, str(row.num_tokens), f"{row.floor:.1f}", times)
        console.print(table)


class _Fixed(FewRows):
    """In one variant whatever the size."""

    def __init__(self, device: torch.device, tuning: Tuning) -> None:
        super().__init__(device)
        self._fixed = tuning

    def fp8_tuning(self, num_tiles: int, num_tokens: int) -> Tuning:
        return self._fixed


def _tiles(num_tokens: int) -> Iterator[Tile]:
    tokens = 16
    while tokens < min(num_tokens, 128):
        tokens *= 2
    for outputs in OUTPUTS:
        for num_warps in WARPS:
            for num_stages in STAGES:
                yield Tile(tokens, outputs, num_warps, num_stages)


def _tunings(num_tokens: int) -> Iterator[Tuning]:
    for row_tiles, warps, depth in VARIANTS:
        # A block has 48 KiB of shared memory; and what does not fit a thread's registers is not tried.
        if num_tokens > 8 and (row_tiles * warps > 32 or row_tiles * depth > 4):
            continue
        for prefetch in PREFETCHES:
            yield Tuning(row_tiles, warps, depth, prefetch)
