"""Times the experts of decode steps of few rows at the sizes of Qwen3-30B-A3B.

Run by python -m benchmarks.kernels.few_experts; it requires CUDA.

The floor is the time to copy the bytes of the chosen experts. Layers are distinct in memory, so that no cache holds
them. "whole" is the router and both products in turn, in one CUDA graph. The parts run by themselves.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine_limits import measure_limits
from benchmarks.kernels.graph_time import median_us
from tandem.engine.layers.experts.few_rows import FewRowsExperts
from tandem.engine.layers.experts.linear import ExpertLinear
from tandem.engine.layers.experts.router_kernel import Routed, RouterKernel
from tandem.engine.layers.norm import Norm
from tandem.engine.models.experts import Routing
from tandem.engine.models.quantization import Quantization

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_CHOSEN = 2048, 768, 128, 8
NUM_ROWS = (1, 2, 4, 8)
NUM_LAYERS = 6
NUM_PASSES = 8
KINDS = {"bfloat16": None, "FP8 channel": Quantization(), "FP8 block": Quantization("block", "group")}
# FP8 numbers are about 1, so their scale is the size of weights.
WEIGHT_SCALE = 0.02
ROUTING = Routing("softmax", NUM_CHOSEN, normalize=True)


class Layer(NamedTuple):
    router: torch.Tensor
    gate_up: ExpertLinear
    down: ExpertLinear


class Row(NamedTuple):
    """Microseconds of one layer. Attributes: num_experts: distinct experts, mean of the layers."""

    num_rows: int
    num_experts: float
    router: float
    gate_up: float
    down: float
    whole: float
    floor: float


class FewExperts:
    def __init__(self, kind: str, copy_bandwidth: float) -> None:
        """Args: copy_bandwidth: bytes per second."""
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._layers = [self._layer(kind) for _ in range(NUM_LAYERS)]
        self._expert_s = 3 * HIDDEN * INTERMEDIATE * (2 if KINDS[kind] is None else 1) / copy_bandwidth
        self._norm = Norm(torch.ones(HIDDEN, device=self._device).bfloat16(), 1e-6)
        self._router = RouterKernel(self._device)
        self._experts = FewRowsExperts(self._device)

    def measure(self, num_rows: int) -> Row:
        given = torch.randn(num_rows, HIDDEN, device=self._device).bfloat16()
        x = given.clone()
        routed = []
        for layer in self._layers * NUM_PASSES:
            routed.append(self._forward(layer, x))
        num_experts = sum(len(r.experts.unique()) for r in routed) / len(routed)
        hidden = x.new_empty(num_rows, NUM_CHOSEN, INTERMEDIATE).normal_()

        def whole() -> None:
            x.copy_(given)
            for layer in self._layers * NUM_PASSES:
                self._forward(layer, x)

        def router() -> None:
            for layer in self._layers * NUM_PASSES:
                self._router.route(x, self._norm, layer.router, ROUTING)

        def gate_up() -> None:
            for layer, r in zip(self._layers * NUM_PASSES, routed, strict=True):
                self._experts.gate_up(r.normed, r.experts, layer.gate_up)

        def down() -> None:
            for layer, r in zip(self._layers * NUM_PASSES, routed, strict=True):
                self._experts.down(hidden, r.weights, r.experts, layer.down, x)

        def of_layer(run: Callable[[], None]) -> float:
            return median_us(run) / len(routed)

        floor = num_experts * self._expert_s * 1e6
        return Row(num_rows, num_experts, of_layer(router), of_layer(gate_up), of_layer(down), of_layer(whole), floor)

    def _forward(self, layer: Layer, x: torch.Tensor) -> Routed:
        routed = self._router.route(x, self._norm, layer.router, ROUTING)
        self._experts.forward(*routed, layer.gate_up, layer.down, x)
        return routed

    def _layer(self, kind: str) -> Layer:
        router = torch.randn(NUM_EXPERTS, HIDDEN, device=self._device).bfloat16()
        return Layer(router, self._linear(kind, 2 * INTERMEDIATE, HIDDEN), self._linear(kind, HIDDEN, INTERMEDIATE))

    def _linear(self, kind: str, out_size: int, in_size: int) -> ExpertLinear:
        linear = ExpertLinear(NUM_EXPERTS, [out_size], in_size, KINDS[kind], torch.bfloat16, self._device)
        numbers = torch.randn(linear.weight.shape, device=self._device)
        linear.weight.copy_(numbers if linear.scale is not None else numbers * WEIGHT_SCALE)
        if linear.scale is not None:
            linear.scale.fill_(WEIGHT_SCALE)
        return linear


def show(rows: Sequence[Row], title: str, console: Console) -> None:
    table = Table(title=title)
    for column in ("rows", "experts", "router", "gate_up", "down", "whole", "floor", "whole / floor"):
        table.add_column(column, justify="right")
    for row in rows:
        figures = [f"{value:.1f}" for value in row[1:]]
        table.add_row(str(row.num_rows), *figures, f"{row.whole / row.floor:.2f}")
    console.print(table)


@torch.inference_mode()
def main() -> None:
    limits = measure_limits()
    console = Console(width=100)
    for kind in KINDS:
        kernels = FewExperts(kind, limits.copy_bandwidth)
        show([kernels.measure(num_rows) for num_rows in NUM_ROWS], f"{kind}, microseconds of a layer", console)
        del kernels
        torch.cuda.empty_cache()
    console.print(f"copy {limits.copy_bandwidth / 1e12:.2f} TB/s")


if __name__ == "__main__":
    main()
