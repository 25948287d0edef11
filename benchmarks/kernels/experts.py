"""Times the grouped kernels of a layer's experts. Importing it requires CUDA.

Tiles are named rows/outputs/depth/stages/warps.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kernels.layers import WEIGHT_SCALE, LayerKernels
from tandem.engine.floors import BYTES_PER_NUMBER, FP8_BYTES_PER_NUMBER, FP8_SPEED, Limits
from tandem.engine.layers.experts.grouped import GroupedExperts, quantized
from tandem.engine.layers.experts.linear import ExpertLinear
from tandem.engine.layers.experts.tiles import Tile, num_bytes
from tandem.engine.layers.fp8 import FP8_MAX
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.quantization import BLOCK

# Minimum size of all layers together, so that no cache holds them.
MIN_BYTES = 2**30
# Layers of a graph: its launch takes longer than a small kernel.
MIN_RUNS = 24
# Candidate tiles: outputs, bytes of a row per step, steps in flight and warps.
OUTPUTS, STEP_BYTES, STAGES, WARPS = (64, 128, 256), (128, 256), (2, 3, 4), (4, 8)
NUM_SHOWN = 4


class Row(NamedTuple):
    """Microseconds.

    Attributes:
        num_touched: distinct experts of the tokens.
        quantize: both quantizations, 0 in bfloat16.
        whole: all kernels, in one graph.
        floor: for the bytes of the distinct experts or the operations.
    """

    num_tokens: int
    num_touched: int
    align: float
    quantize: float
    gate_up: float
    down: float
    combine: float
    whole: float
    floor: float


class ExpertKernels:
    """Experts as configured by the model, in bfloat16 or FP8. Tokens choose experts uniformly."""

    def __init__(self, model: ModelConfig, limits: Limits) -> None:
        assert model.experts is not None
        self._model = model
        self._limits = limits
        self._config = model.experts
        self._k = model.experts.routing.num_chosen
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._time = LayerKernels(model, limits).time
        self._grouped = GroupedExperts(self._device)
        hidden_size, size = model.hidden_size, self._config.intermediate_size
        self._expert_numbers = 3 * hidden_size * size
        self._bytes_per_number = FP8_BYTES_PER_NUMBER if model.quantization else BYTES_PER_NUMBER
        layer_bytes = self._config.num_experts * self._expert_numbers * self._bytes_per_number
        num_layers = max(2, -(-MIN_BYTES // layer_bytes))
        self._gate_ups = [self._linear([size, size], hidden_size) for _ in range(num_layers)]
        self._downs = [self._linear([hidden_size], size) for _ in range(num_layers)]

    def row(self, num_tokens: int) -> Row:
        grouped, gate_up, down = self._grouped, self._gate_ups[0], self._downs[0]
        x, weights, experts = self._routed(num_tokens)
        num_experts = down.num_experts
        tiles = grouped.tiles(experts.numel(), down)
        aligned = grouped.align(experts, num_experts, tiles.rows)
        inputs = quantized(x, gate_up)
        h = grouped.gate_up(inputs, gate_up, aligned, self._k, tiles.rows, tiles.gate_up)
        pair_inputs = quantized(h, down)
        y = grouped.down(pair_inputs, down, aligned, tiles.rows, tiles.down)
        quantize = 0.0
        if self._model.quantization:
            quantize = self._of_each(lambda g, d: (quantized(x, g), quantized(h, d)))
        num_touched = len(experts.unique())
        return Row(
            num_tokens,
            num_touched,
            self._of_each(lambda g, d: grouped.align(experts, num_experts, tiles.rows)),
            quantize,
            self._of_each(lambda g, d: grouped.gate_up(inputs, g, aligned, self._k, tiles.rows, tiles.gate_up)),
            self._of_each(lambda g, d: grouped.down(pair_inputs, d, aligned, tiles.rows, tiles.down)),
            self._of_each(lambda g, d: grouped.combine(y, weights, experts, x, num_experts)),
            self._of_each(lambda g, d: grouped.forward(x, weights, experts, g, d, x)),
            self._floor(num_tokens, num_touched, self._expert_numbers),
        )

    def tune(self, num_tokens: int) -> Iterator[tuple[str, float, dict[str, float]]]:
        """Yield each product's name, its floor, and the times of the fastest tiles by name."""
        x, _, experts = self._routed(num_tokens)
        chosen = self._grouped.tiles(experts.numel(), self._downs[0]).rows
        gate_up_times: dict[str, float] = {}
        down_times: dict[str, float] = {}
        for rows in (chosen // 2, chosen, 2 * chosen):
            gate_up_times |= self._gate_up_times(x, experts, rows)
            down_times |= self._down_times(experts, rows)
        num_touched = len(experts.unique())
        for name, num_factors, times in (("gate_up", 2, gate_up_times), ("down", 1, down_times)):
            floor = self._floor(num_tokens, num_touched, self._expert_numbers * num_factors // 3)
            yield name, floor, dict(sorted(times.items(), key=lambda item: item[1])[:NUM_SHOWN])

    def _gate_up_times(self, x: torch.Tensor, experts: torch.Tensor, rows: int) -> dict[str, float]:
        inputs = quantized(x, self._gate_ups[0])
        aligned = self._grouped.align(experts, self._config.num_experts, rows)

        def time(tile: Tile) -> float:
            return self._of_each(lambda g, d: self._grouped.gate_up(inputs, g, aligned, self._k, rows, tile))

        return {_name(rows, tile): time(tile) for tile in self._candidates(2, rows)}

    def _down_times(self, experts: torch.Tensor, rows: int) -> dict[str, float]:
        h = torch.randn(experts.numel(), self._config.intermediate_size, device=self._device).bfloat16()
        inputs = quantized(h, self._downs[0])
        aligned = self._grouped.align(experts, self._config.num_experts, rows)

        def time(tile: Tile) -> float:
            return self._of_each(lambda g, d: self._grouped.down(inputs, d, aligned, rows, tile))

        return {_name(rows, tile): time(tile) for tile in self._candidates(1, rows)}

    def _candidates(self, num_factors: int, rows: int) -> Iterator[Tile]:
        kind = self._downs[0].kind
        properties: Any = torch.cuda.get_device_properties(self._device)
        limit = properties.shared_memory_per_block_optin
        for outputs in OUTPUTS:
            for depth in (BLOCK,) if kind == "block" else [size // self._bytes_per_number for size in STEP_BYTES]:
                for num_stages in STAGES:
                    for num_warps in WARPS:
                        tile = Tile(outputs, depth, num_stages, num_warps)
                        num_sums = num_factors * outputs * rows
                        # A thread holds at most 128 sums.
                        if num_sums <= 128 * 32 * num_warps and num_bytes(tile, num_factors, rows, kind) <= limit:
                            yield tile

    def _linear(self, out_sizes: Sequence[int], in_size: int) -> ExpertLinear:
        model = self._model
        linear = ExpertLinear(
            self._config.num_experts, out_sizes, in_size, model.quantization, torch.bfloat16, self._device
        )
        for weight in linear.weight:
            numbers = torch.randn(weight.shape, device=self._device)
            weight.copy_(numbers * (WEIGHT_SCALE if linear.scale is None else FP8_MAX / 5))
        for name, parameter in linear.stacked_parameters("experts"):
            if name.endswith("weight_scale"):
                parameter.fill_(5 * WEIGHT_SCALE / FP8_MAX)
            elif name.endswith("input_scale"):
                parameter.fill_(8 / FP8_MAX)
        linear.loaded()
        return linear

    def _routed(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return inputs, weights and experts of each token."""
        x = torch.randn(num_tokens, self._model.hidden_size, device=self._device).bfloat16()
        scores = torch.randn(num_tokens, self._config.num_experts, device=self._device)
        weights, experts = scores.topk(self._k)
        return x, weights.softmax(-1), experts.int()

    def _of_each(self, run: Callable[[ExpertLinear, ExpertLinear], object]) -> float:
        layers = list(zip(self._gate_ups, self._downs, strict=True))
        layers *= -(-MIN_RUNS // len(layers))
        return self._time(lambda: [run(*layer) for layer in layers], len(layers))

    def _floor(self, num_tokens: int, num_touched: int, numbers: int) -> float:
        """Args: numbers: of an expert's matrices."""
        rate = self._limits.matmul_rate * (FP8_SPEED if self._model.quantization else 1)
        flops = 2 * num_tokens * self._k * numbers
        return max(num_touched * numbers * self._bytes_per_number / self._limits.copy_bandwidth, flops / rate) * 1e6


def show(rows: Sequence[Row], title: str, console: Console) -> None:
    table = Table("tokens", title=title)
    for column in ("experts", "align", "quantize", "gate_up", "down", "combine", "whole", "floor", "times the floor"):
        table.add_column(column, justify="right")
    for row in rows:
        times = (f"{time:.1f}" for time in row[2:])
        table.add_row(str(row.num_tokens), str(row.num_touched), *times, f"{row.whole / row.floor:.2f}")
    console.print(table)


def show_tiles(kernels: ExpertKernels, num_tokens: Sequence[int], title: str, console: Console) -> None:
    table = Table("product", "tokens", "floor", "fastest tiles", title=title)
    for count in num_tokens:
        for name, floor, times in kernels.tune(count):
            table.add_row(
                name, str(count), f"{floor:.1f}", ", ".join(f"{tile} {time:.1f}" for tile, time in times.items())
            )
    console.print(table)


def _name(rows: int, tile: Tile) -> str:
    return "/".join(map(str, (rows, *tile)))
