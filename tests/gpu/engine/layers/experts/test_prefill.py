"""Experts of many tokens against plain torch in float32."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tandem.engine.layers.experts.linear import ExpertLinear
from tandem.engine.layers.fp8 import as_quantized, dequantize, round_to_fp8
from tandem.engine.models.quantization import BLOCK, Quantization
from tests.gpu.engine.layers.experts.test_permutation import skewed, uniform

DEVICE = torch.device("cuda", 0)
# xn, weights, experts, gate_up, down.
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, ExpertLinear, ExpertLinear]
KINDS = {
    "plain": None,
    "token": Quantization(),
    "static": Quantization("channel", "static"),
    "group": Quantization("block", "group"),
}
# Of the experts' sum, relative to its norm. FP8 inputs of the second product amplify small differences of the first:
# near the middle of two numbers they round to the other, and a token's scale moves with its largest input. That is
# 0.7 % on average and up to 2 %; test_expert_products.py bounds each product for given inputs.
MAX_ERROR = {"plain": 6e-3, "token": 3e-2, "static": 3e-2, "group": 3e-2}
# hidden_size, expert_size, experts, k.
SIZES = {"many experts": (512, 256, 128, 8), "1408": (1024, 1408, 60, 4), "few experts": (512, 1024, 8, 2)}


def linear_of(kind: str, weight: torch.Tensor, scale: torch.Tensor | None) -> ExpertLinear:
    num_experts, out_size, in_size = weight.shape
    linear = ExpertLinear(num_experts, [out_size], in_size, KINDS[kind], torch.bfloat16, DEVICE)
    values = {"weight": weight, "weight_scale": scale, "input_scale": torch.full((num_experts, 1), 4 / 448)}
    for name, parameter in linear.stacked_parameters("experts"):
        value = values[name.removeprefix("experts.")]
        assert value is not None and value.shape == parameter.shape
        parameter.copy_(value)
    linear.loaded()
    return linear


def matrices(kind: str, num_experts: int, out_size: int, in_size: int) -> ExpertLinear:
    weight = torch.randn(num_experts, out_size, in_size, device=DEVICE) * in_size**-0.5
    if kind == "plain":
        return linear_of(kind, weight.bfloat16(), None)
    if kind == "group":
        blocks = weight.view(num_experts, out_size // BLOCK, BLOCK, in_size // BLOCK, BLOCK)
        scale = blocks.abs().amax(dim=(2, 4)) / 448
        numbers = round_to_fp8(blocks, scale[:, :, None, :, None]).view_as(weight)
        return linear_of(kind, numbers, scale)
    scale = weight.abs().amax(dim=2, keepdim=True) / 448
    return linear_of(kind, round_to_fp8(weight, scale), scale)


def product(x: torch.Tensor, matrix: ExpertLinear, expert: int) -> torch.Tensor:
    """Quantizes x as the kernels do; float32."""
    if matrix.scale is None or matrix.inputs is None:
        return x.float() @ matrix.weight[expert].float().t()
    x = as_quantized(x.float(), matrix.inputs, matrix.input_scale)
    return x @ dequantize(matrix.weight[expert], matrix.scale[expert]).t()


def reference(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: ExpertLinear,
    down: ExpertLinear,
    first_expert: int = 0,
) -> torch.Tensor:
    """Returns the sum over experts, without the residual, (num_tokens, hidden_size) float32."""
    total = torch.zeros(len(x), x.shape[1], device=DEVICE)
    for expert in range(down.num_experts):
        tokens, j = (experts == first_expert + expert).nonzero(as_tuple=True)
        gate, up = product(x[tokens], gate_up, expert).chunk(2, dim=1)
        h = F.silu(gate) * up
        # The kernel rounds to FP8 at once, unless a token's scale needs all of its outputs.
        y = product(h.bfloat16() if down.scale is None or down.inputs == "token" else h, down, expert)
        total.index_add_(0, tokens, y * weights[tokens, j, None])
    return total


def case(kind: str, num_tokens: int, size: str = "many experts", routing: Any = uniform) -> Case:
    hidden_size, expert_size, num_experts, k = SIZES[size]
    experts = routing(num_tokens, num_experts, k)
    gate_up = matrices(kind, num_experts, 2 * expert_size, hidden_size)
    down = matrices(kind, num_experts, hidden_size, expert_size)
    x = torch.randn(num_tokens, hidden_size, device=DEVICE).bfloat16()
    return x, torch.rand(num_tokens, k, device=DEVICE), experts, gate_up, down


def run(arguments: Case, residual: torch.Tensor, first_expert: int = 0) -> torch.Tensor:
    from tandem.engine.layers.experts.prefill import PrefillExperts

    layer = PrefillExperts(DEVICE)
    x, _, experts, gate_up, down = arguments
    assert layer.fits(x, experts.shape[1], gate_up, down)
    residual = residual.clone()
    out = layer.forward(*arguments, residual, first_expert)
    assert out is residual
    return out


def check(kind: str, arguments: Case, first_expert: int = 0) -> None:
    expected = reference(*arguments, first_expert)
    actual = run(arguments, torch.zeros_like(arguments[0]), first_expert).float()
    assert (actual - expected).norm() < MAX_ERROR[kind] * expected.norm()
    # Per token, so that large tokens do not hide errors in others.
    assert ((actual - expected).norm(dim=1) <= 2 * MAX_ERROR[kind] * expected.norm(dim=1)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_tokens", [1, 1023, 4096])
@pytest.mark.parametrize("routing", [uniform, skewed])
def test_equals_torch(kind: str, size: str, num_tokens: int, routing: Any) -> None:
    torch.manual_seed(0)
    check(kind, case(kind, num_tokens, size, routing))


@pytest.mark.parametrize("kind", ["plain", "token"])
def test_sizes_that_tiles_do_not_divide(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    for hidden_size, expert_size in ((448, 160), (64, 32), (320, 352)):
        monkeypatch.setitem(SIZES, "odd", (hidden_size, expert_size, 6, 3))
        check(kind, case(kind, 777, "odd"))


@pytest.mark.parametrize("kind", KINDS)
def test_one_expert_has_all_tokens(kind: str) -> None:
    torch.manual_seed(0)
    x, weights, experts, gate_up, down = case(kind, 3001, "few experts")
    check(kind, (x, weights, (torch.arange(2, device=DEVICE) + 3).int().expand_as(experts).contiguous(), gate_up, down))


@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_this_device_alone(kind: str) -> None:
    torch.manual_seed(0)
    x, weights, experts, gate_up, down = case(kind, 2000)
    for first_expert, num_experts in ((0, 32), (96, 32), (50, 5)):
        some = slice(first_expert, first_expert + num_experts)
        parts = [linear_of(kind, m.weight[some], None if m.scale is None else m.scale[some]) for m in (gate_up, down)]
        check(kind, (x, weights, experts, parts[0], parts[1]), first_expert)


def test_adds_to_the_residual() -> None:
    torch.manual_seed(0)
    arguments = case("plain", 1500)
    residual = torch.randn_like(arguments[0]) * 4
    expected = reference(*arguments) + residual.float()
    # One rounding to bfloat16.
    assert ((run(arguments, residual).float() - expected).abs() <= 2**-7 * expected.abs() + 0.02).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1024, 8192])
def test_repeats_to_the_bit(kind: str, num_tokens: int) -> None:
    torch.manual_seed(0)
    arguments = case(kind, num_tokens)
    residual = torch.randn_like(arguments[0])
    first = run(arguments, residual)
    for _ in range(100 if num_tokens == 1024 else 20):
        assert torch.equal(run(arguments, residual), first)


@pytest.mark.parametrize("kind", KINDS)
def test_other_tokens_change_no_bit(kind: str) -> None:
    torch.manual_seed(0)
    arguments = case(kind, 2048)
    others = case(kind, 2048, routing=skewed)
    residual = torch.randn_like(arguments[0])
    expected = run(arguments, residual)
    kept = torch.rand(2048, device=DEVICE) < 0.2
    x, weights, chosen = (torch.where(kept[:, None], a, b) for a, b in zip(arguments[:3], others[:3], strict=True))
    actual = run((x, weights, chosen, *arguments[3:]), residual)
    assert torch.equal(actual[kept], expected[kept])
    assert not torch.equal(actual[~kept], expected[~kept])


@pytest.mark.parametrize("kind", KINDS)
def test_replays_in_a_graph_with_another_routing(kind: str) -> None:
    from tandem.engine.layers.experts.prefill import PrefillExperts

    torch.manual_seed(0)
    layer = PrefillExperts(DEVICE)
    arguments, others = case(kind, 1500), case(kind, 1500, routing=skewed)
    out = torch.zeros_like(arguments[0])
    layer.forward(*arguments, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.forward(*arguments, out)
    expected = run((*others[:3], *arguments[3:]), torch.zeros_like(out))
    for target, source in zip(arguments[:3], others[:3], strict=True):
        target.copy_(source)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


def test_refuses_sizes_that_copies_cannot_divide() -> None:
    from tandem.engine.layers.experts.prefill import PrefillExperts

    x, _, experts, gate_up, down = case("plain", 8)
    layer = PrefillExperts(DEVICE)
    num_chosen = experts.shape[1]
    assert not layer.fits(x, num_chosen, gate_up, matrices("plain", 128, 512, 240))
    assert not layer.fits(x.float(), num_chosen, gate_up, down)
