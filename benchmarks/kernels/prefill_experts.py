"""Times the experts of many tokens, at sizes of known models. Needs CUDA.

    python -m benchmarks.kernels.prefill_experts --tokens 1024 8192

The routing is uniform. All times are of one layer, in microseconds; layers in turn have different weights, so that no
cache holds them.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine_limits import measure_limits
from benchmarks.kernels.graph_time import median_us
from tandem.engine.floors import Limits
from tandem.engine.layers.experts.expert_products import TILE_ROWS, ExpertProducts
from tandem.engine.layers.experts.grouped import quantized
from tandem.engine.layers.experts.linear import ExpertLinear
from tandem.engine.layers.experts.permutation import Permuter
from tandem.engine.layers.experts.prefill import PrefillExperts, combine, quantize_places
from tandem.engine.models.quantization import Quantization

TOKENS = (1024, 2048, 4096, 8192, 32768)
KINDS = {"bfloat16": None, "channel": Quantization(), "block": Quantization("block", "group")}
WEIGHT_SCALE = 0.02
NUM_LAYERS = 2


class Model(NamedTuple):
    hidden_size: int
    expert_size: int
    num_experts: int
    k: int


MODELS = {
    "qwen3-30b-a3b": Model(2048, 768, 128, 8),
    "mixtral-8x7b": Model(4096, 14336, 8, 2),
    "olmoe": Model(2048, 1024, 64, 8),
    "qwen2-moe": Model(2048, 1408, 60, 4),
}


class Row(NamedTuple):
    """Microseconds by step, and of all of them together. Attributes: flops: of the products."""

    kind: str
    num_tokens: int
    times: dict[str, float]
    whole: float
    flops: float


class PrefillKernels:
    def __init__(self, model: Model, kind: str) -> None:
        self._model = model
        self._kind = kind
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._experts = PrefillExperts(self._device)
        self._products = ExpertProducts(self._device)
        self._permuter = Permuter(model.num_experts, self._device)
        sizes = (2 * model.expert_size, model.hidden_size), (model.hidden_size, model.expert_size)
        self._layers = [[self._linear(*size) for size in sizes] for _ in range(NUM_LAYERS)]

    def measure(self, num_tokens: int) -> Row:
        model, products = self._model, self._products
        x = torch.randn(num_tokens, model.hidden_size, device=self._device).bfloat16()
        experts = torch.rand(num_tokens, model.num_experts, device=self._device).topk(model.k).indices.int()
        weights = torch.full(experts.shape, 1 / model.k, device=self._device)
        residual = torch.zeros_like(x)
        gate_up, down = self._layers[0]
        permutation = self._permuter.permute(experts, TILE_ROWS)
        times = {"permute": self._time(lambda *_: self._permuter.permute(experts, TILE_ROWS))}
        inputs = quantized(x, gate_up)
        if self._kind != "bfloat16":
            times["quantize"] = self._time(lambda up, _: quantized(x, up))
        times["gate_up"] = self._time(lambda up, to: products.gate_up(inputs, up, to, permutation))
        gated = products.gate_up(inputs, gate_up, down, permutation)
        if self._kind != "bfloat16" and isinstance(gated, torch.Tensor):
            unquantized = gated
            times["quantize"] += self._time(lambda *_: quantize_places(unquantized, permutation))
            gated = quantize_places(unquantized, permutation)
        times["down"] = self._time(lambda _, to: products.down(gated, to, permutation))
        y = products.down(gated, down, permutation)
        times["combine"] = self._time(lambda *_: combine(y, weights, permutation.places, residual))
        whole = self._time(lambda up, to: self._experts.forward(x, weights, experts, up, to, residual))
        flops = 6 * num_tokens * model.k * model.hidden_size * model.expert_size
        return Row(self._kind, num_tokens, times, whole, flops)

    def _linear(self, out_size: int, in_size: int) -> ExpertLinear:
        quantization = KINDS[self._kind]
        linear = ExpertLinear(self._model.num_experts, [out_size], in_size, quantization, torch.bfloat16, self._device)
        for weight in linear.weight:
            numbers = torch.randn(weight.shape, device=self._device)
            # FP8 numbers of usual size, whatever their scales.
            weight.copy_(numbers * (WEIGHT_SCALE if quantization is None else 80))
        if linear.scale is not None:
            linear.scale.fill_(WEIGHT_SCALE / 80)
        return linear

    def _time(self, run: Callable[[ExpertLinear, ExpertLinear], object]) -> float:
        """Returns the median time of one layer, of graphs of all layers."""

        def run_all() -> None:
            for gate_up, down in self._layers:
                run(gate_up, down)

        return median_us(run_all) / len(self._layers)


def show(rows: Sequence[Row], title: str, limits: Limits, console: Console) -> None:
    table = Table("weights", title=title)
    steps = ("permute", "quantize", "gate_up", "down", "combine")
    for column in ("tokens", *steps, "whole", "TFLOP/s", "of the matmul rate"):
        table.add_column(column, justify="right")
    for row in rows:
        rate = row.flops / row.whole * 1e6
        times = (f"{row.times[step]:.1f}" if step in row.times else "" for step in steps)
        share = f"{rate / limits.matmul_rate:.2f}"
        table.add_row(row.kind, str(row.num_tokens), *times, f"{row.whole:.1f}", f"{rate / 1e12:.0f}", share)
    console.print(table)


def measure(model: Model, kinds: Sequence[str], tokens: Sequence[int]) -> Iterator[Row]:
    for kind in kinds:
        kernels = PrefillKernels(model, kind)
        for num_tokens in tokens:
            yield kernels.measure(num_tokens)
        del kernels
        torch.cuda.empty_cache()


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.kernels.prefill_experts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b-a3b", help="(default: %(default)s)")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=KINDS, help="weights (default: all)")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    arguments = parser.parse_args(argv)
    limits = measure_limits()
    rows = list(measure(MODELS[arguments.model], arguments.kinds, arguments.tokens))
    show(rows, f"{arguments.model}, experts, microseconds", limits, Console(width=120))
    print(f"copy {limits.copy_bandwidth / 1e12:.2f} TB/s, matmul {limits.matmul_rate / 1e12:.0f} TFLOP/s")
    if arguments.json:
        arguments.json.write_text(json.dumps([row._asdict() for row in rows], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
