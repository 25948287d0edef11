"""The reference path against a loop over tokens and experts, and its independence of the batch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tandem.engine.layers.experts.base import Experts, Router, SharedExpert
from tandem.engine.layers.experts.linear import ExpertLinear
from tandem.engine.layers.experts.reference import _gated, mixture
from tandem.engine.layers.experts.routing import choose_experts, router_logits
from tandem.engine.layers.fp8 import FP8_MAX, as_quantized, round_to_fp8
from tandem.engine.layers.linear import Linear
from tandem.engine.models.experts import Routing
from tandem.engine.models.quantization import BLOCK, InputScales, Quantization, WeightScales

CPU = torch.device("cpu")
NUM_EXPERTS, HIDDEN_SIZE, SIZE = 8, 128, 256
NUM_ROWS = (1, 2, 5, 64, 100)
TOP2 = Routing("softmax", 2, normalize=True)
ROUTINGS = {
    "softmax": TOP2,
    "one": Routing("softmax", 1),
    "all": Routing("softmax", NUM_EXPERTS),
    "sigmoid": Routing("sigmoid", 3, True, 2.5, has_bias=True, num_groups=4, num_groups_used=2),
}
FP8: dict[str, tuple[WeightScales, InputScales]] = {
    "tensor": ("tensor", "token"),
    "channel": ("channel", "token"),
    "static": ("tensor", "static"),
    "channel static": ("channel", "static"),
    "block": ("block", "group"),
}


def make_linear(out_sizes: list[int], in_size: int, dtype: torch.dtype, quantization: Quantization | None) -> Any:
    linear = ExpertLinear(NUM_EXPERTS, out_sizes, in_size, quantization, dtype, CPU)
    weight = torch.randn(linear.weight.shape) / in_size**0.5
    if linear.scale is None:
        linear.weight.copy_(weight)
        return linear
    assert quantization is not None
    scale = weight.abs().amax() * torch.ones_like(linear.scale) / FP8_MAX
    if quantization.weights != "tensor":
        scale *= torch.rand(scale.shape) + 1
    linear.scale.copy_(scale)
    for expert in range(NUM_EXPERTS):
        linear.weight[expert] = round_to_fp8(weight[expert], expanded(linear.scale[expert], linear.is_block))
    for name, parameter in linear.stacked_parameters("x"):
        if name.endswith("input_scale"):
            parameter.copy_(0.01 + torch.rand(parameter.shape) / 100)
    linear.loaded()
    return linear


def expanded(scale: torch.Tensor, is_block: bool) -> torch.Tensor:
    return torch.kron(scale, torch.ones(BLOCK, BLOCK)) if is_block else scale


def make_experts(
    routing: Routing = TOP2,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization | None = None,
    shared: bool = False,
) -> Experts:
    torch.manual_seed(3)
    bias = torch.randn(NUM_EXPERTS) / 5 if routing.has_bias else None
    router = Router(torch.randn(NUM_EXPERTS, HIDDEN_SIZE).to(dtype) / HIDDEN_SIZE**0.5, bias, routing)
    gate_up = make_linear([SIZE, SIZE], HIDDEN_SIZE, dtype, quantization)
    down = make_linear([HIDDEN_SIZE], SIZE, dtype, quantization)
    if not shared:
        return Experts(router, gate_up, down)
    shared_gate_up = Linear([96] * 2, HIDDEN_SIZE, False, dtype, CPU)
    shared_down = Linear([HIDDEN_SIZE], 96, False, dtype, CPU)
    for linear in (shared_gate_up, shared_down):
        linear.weight.normal_(0.0, 0.1)
    gate = torch.randn(1, HIDDEN_SIZE).to(dtype) / 10
    return Experts(router, gate_up, down, SharedExpert(shared_gate_up, shared_down, gate))


def rows(num_rows: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return inputs of which most choose the same experts."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    share = torch.rand(num_rows, 1, generator=generator)
    return (share * common + (1 - share) * torch.randn(num_rows, HIDDEN_SIZE, generator=generator)).to(dtype)


def by_loop(x: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Return the mixture in float64, token by token."""
    router = experts.router
    weights, chosen = choose_experts(router_logits(x, router.weight, router.routing), router.bias, router.routing)
    total = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            held = expert - experts.first
            if 0 <= held < experts.gate_up.num_experts:
                gate, up = projected(row, experts.gate_up, held).chunk(2)
                total[token] += weight * projected((F.silu(gate) * up).to(x.dtype), experts.down, held)
    if experts.shared is not None:
        gate, up = (x.double() @ experts.shared.gate_up.weight.double().T).chunk(2, dim=1)
        output = (F.silu(gate) * up) @ experts.shared.down.weight.double().T
        assert experts.shared.gate is not None
        total += torch.sigmoid(x.double() @ experts.shared.gate.double().T) * output
    return total


def projected(row: torch.Tensor, linear: ExpertLinear, expert: int) -> torch.Tensor:
    weight = linear.weight[expert].double()
    if linear.scale is not None:
        weight = weight * expanded(linear.scale[expert], linear.is_block)
    if linear.inputs is not None:
        row = as_quantized(row, linear.inputs, linear.input_scale)
    return weight @ row.double()


@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared"])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_equals_a_loop(routing: Routing, num_rows: int, shared: bool) -> None:
    experts, x = make_experts(routing, shared=shared), rows(num_rows, 1)
    torch.testing.assert_close(mixture(x, experts).double(), by_loop(x, experts), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_bfloat16_rounds_little(routing: Routing) -> None:
    experts, x = make_experts(routing, torch.bfloat16, shared=True), rows(100, 1, torch.bfloat16)
    actual, expected = mixture(x, experts), by_loop(x, experts)
    assert actual.dtype is torch.bfloat16
    assert (actual.double() - expected).norm() / expected.norm() < 2**-7


@pytest.mark.parametrize("num_rows", [1, 5, 100])
@pytest.mark.parametrize("kind", FP8)
def test_fp8_equals_the_dequantized_numbers(kind: str, num_rows: int) -> None:
    experts, x = make_experts(quantization=Quantization(*FP8[kind])), rows(num_rows, 1)
    found = mixture(x, experts).double()
    # An input at the middle of two FP8 numbers may be rounded either way, if the down projection's input differs by its
    # last bit.
    difference = (found - by_loop(x, experts)).abs()
    assert difference.median() < 1e-5 and difference.max() < 0.02 * found.abs().max()
    plain = experts._replace(
        gate_up=dequantized(experts.gate_up, [SIZE, SIZE]), down=dequantized(experts.down, [HIDDEN_SIZE])
    )
    rounding = (found - mixture(x, plain)).norm() / found.norm()
    assert 0.005 < rounding < 0.1


def dequantized(linear: ExpertLinear, out_sizes: list[int]) -> ExpertLinear:
    plain = ExpertLinear(NUM_EXPERTS, out_sizes, linear.weight.shape[2], None, torch.float32, CPU)
    for expert in range(NUM_EXPERTS):
        plain.weight[expert] = linear.of_expert(expert)
    return plain


@pytest.mark.parametrize("kind", ["plain", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_other_rows_change_no_bit_of_a_row(num_rows: int, dtype: torch.dtype, kind: str) -> None:
    quantization = None if kind == "plain" else Quantization(*FP8[kind])
    experts = make_experts(dtype=dtype, quantization=quantization, shared=True)
    x = rows(num_rows, 1, dtype)
    expected = mixture(x, experts)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(num_rows, generator=generator)
        assert torch.equal(mixture(x[order], experts), expected[order])
        kept = int(torch.randint(num_rows, (), generator=generator))
        changed = rows(num_rows, 10 + seed, dtype) * 3
        changed[kept] = x[kept]
        assert torch.equal(mixture(changed, experts)[kept], expected[kept])
        # All rows choose the same experts.
        changed[:] = x[kept]
        assert torch.equal(mixture(changed, experts), expected[kept].expand(num_rows, -1))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_activations_do_not_depend_on_a_rows_place(num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for num_rows, size in ((64, 1408), (333, 100), (2, 40_000)):
            row = torch.randn(2 * size, generator=torch.Generator().manual_seed(4))
            found = _gated(row.expand(num_rows, -1).contiguous())
            assert torch.equal(found, found[:1].expand(num_rows, -1))
            torch.testing.assert_close(found[0], F.silu(row[:size]) * row[size:])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_batch_gives_the_same_bits(dtype: torch.dtype) -> None:
    experts, x = make_experts(ROUTINGS["sigmoid"], dtype, shared=True), rows(33, 1, dtype)
    expected = mixture(x, experts)
    for _ in range(100):
        assert torch.equal(mixture(x.clone(), experts), expected)


def test_experts_of_other_devices_contribute_nothing() -> None:
    whole, x = make_experts(ROUTINGS["sigmoid"]), rows(20, 1)
    parts = []
    for first in (0, 3, 6):
        part = whole._replace(gate_up=held(whole.gate_up, first, 3), down=held(whole.down, first, 3), first=first)
        parts.append(mixture(x, part))
        torch.testing.assert_close(parts[-1].double(), by_loop(x, part), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sum(parts), mixture(x, whole), atol=1e-5, rtol=1e-5)


def held(linear: ExpertLinear, first: int, num_experts: int) -> ExpertLinear:
    part = ExpertLinear(
        len(linear.weight[first : first + num_experts]),
        [linear.weight.shape[1]],
        linear.weight.shape[2],
        None,
        torch.float32,
        CPU,
    )
    part.weight.copy_(linear.weight[first : first + num_experts])
    return part
