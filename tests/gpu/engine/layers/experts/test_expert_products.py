"""Each product of sorted rows against plain torch in float32, for the same inputs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tandem.engine.layers.experts.linear import ExpertLinear
from tandem.engine.layers.fp8 import FP8_MAX, dequantize
from tandem.engine.models.quantization import BLOCK
from tests.gpu.engine.layers.experts.test_permutation import skewed
from tests.gpu.engine.layers.experts.test_prefill import DEVICE, KINDS, SIZES, case

# Outputs are rounded once to bfloat16. Tensor cores add FP8 products with fewer bits than float32 has.
MAX_ERROR = {"plain": 4e-3, "token": 5e-3, "static": 5e-3, "group": 5e-3}
# Also rounded to FP8; with one scale for all, small numbers lose more.
MAX_GATED_ERROR = MAX_ERROR | {"group": 3.5e-2, "static": 5e-2}


def value(x: Any) -> torch.Tensor:
    """Returns bfloat16 or quantized rows in float32."""
    if isinstance(x, torch.Tensor):
        return x.float()
    numbers, scales = x.numbers[: x.num_tokens].float(), x.scales[: x.num_tokens]
    return numbers * (scales.repeat_interleave(BLOCK, 1) if scales.ndim == 2 and scales.shape[1] > 1 else scales)


def multiply(x: torch.Tensor, linear: ExpertLinear, experts: torch.Tensor) -> torch.Tensor:
    """Args: x: (num_places, in_size) float32; experts: of each place."""
    out = torch.empty(len(x), linear.weight.shape[1], device=DEVICE)
    for expert in experts.unique().tolist():
        weight = linear.weight[expert].float()
        if linear.scale is not None:
            weight = dequantize(linear.weight[expert], linear.scale[expert])
        out[experts == expert] = x[experts == expert] @ weight.t()
    return out


def check(actual: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    assert (actual - expected).norm() < bound * expected.norm()
    assert ((actual - expected).norm(dim=1) <= 2 * bound * expected.norm(dim=1)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_tokens", [1, 1023, 3000])
def test_each_product(kind: str, size: str, num_tokens: int) -> None:
    from tandem.engine.layers.experts.expert_products import TILE_ROWS, ExpertProducts
    from tandem.engine.layers.experts.grouped import quantized
    from tandem.engine.layers.experts.permutation import Permuter
    from tandem.engine.layers.experts.prefill import quantize_places

    torch.manual_seed(0)
    x, _, experts, gate_up, down = case(kind, num_tokens, size, skewed)
    permutation = Permuter(len(down.weight), DEVICE).permute(experts, TILE_ROWS)
    of_places = experts.flatten()[permutation.order.long()]
    tokens = permutation.order.long() // experts.shape[1]
    inputs = quantized(x, gate_up)
    products = ExpertProducts(DEVICE)

    gated = products.gate_up(inputs, gate_up, down, permutation)
    gate, up = multiply(value(inputs)[tokens], gate_up, of_places).chunk(2, dim=1)
    expected = F.silu(gate) * up
    if down.input_scale is not None:
        limit = FP8_MAX * down.input_scale.item()
        expected = expected.clamp(-limit, limit)
    check(value(gated), expected, MAX_GATED_ERROR[kind])

    if kind == "token":
        assert isinstance(gated, torch.Tensor)
        rounded = quantize_places(gated, permutation)
        # Half a step of numbers with 3 bits after the point.
        assert ((value(rounded) - gated.float()).abs() <= gated.float().abs() / 16 + rounded.scales * 2**-10).all()
        gated = rounded
    y = products.down(gated, down, permutation)
    check(y.float(), multiply(value(gated), down, of_places), MAX_ERROR[kind])
