"""Experts of few rows against plain torch, at sizes of models."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from tandem.engine.layers.experts.base import SharedExpert
from tandem.engine.layers.experts.linear import ExpertLinear
from tandem.engine.layers.fp8 import FP8_DTYPE, FP8_MAX
from tandem.engine.layers.fp8_linear import Fp8Linear
from tandem.engine.layers.linear import Linear, LinearBase
from tandem.engine.models.experts import Routing
from tandem.engine.models.quantization import Quantization

# The intermediate result and the sum are each rounded once to bfloat16.
MAX_ERROR = 6e-3
KINDS: dict[str, Quantization | None] = {
    "plain": None,
    "channel": Quantization(),
    "block": Quantization("block", "group"),
}


class Sizes(NamedTuple):
    hidden: int
    intermediate: int
    num_experts: int
    num_chosen: int


SIZES = {
    "30B-A3B": Sizes(2048, 768, 128, 8),
    "8x7B": Sizes(4096, 14336, 8, 2),
    "OLMoE": Sizes(2048, 1024, 64, 8),
    "60 experts": Sizes(2048, 1408, 60, 4),
    "slice": Sizes(2880, 48, 32, 4),
    "small": Sizes(64, 16, 512, 16),
    "small blocks": Sizes(256, 128, 6, 1),
}


class Layer(NamedTuple):
    """Matrices, and their values in float32."""

    gate_up: ExpertLinear
    down: ExpertLinear
    gate_up_values: torch.Tensor
    down_values: torch.Tensor

    def given(self, first: int = 0, last: int | None = None) -> tuple[ExpertLinear, ExpertLinear]:
        """Return a range of the experts."""
        gate_up, down = (
            make_linear(m.kind, m.weight[first:last], None if m.scale is None else m.scale[first:last])
            for m in (self.gate_up, self.down)
        )
        return gate_up, down


def make_linear(kind: str, weight: torch.Tensor, scale: torch.Tensor | None) -> ExpertLinear:
    linear = ExpertLinear(1, [weight.shape[1]], weight.shape[2], KINDS[kind], torch.bfloat16, weight.device)
    linear.weight, linear.scale = weight, scale
    return linear


def make_weights(kind: str, num_experts: int, out: int, size: int) -> tuple[ExpertLinear, torch.Tensor]:
    values = torch.randn(num_experts, out, size, device="cuda") * size**-0.5
    if kind == "plain":
        weight = values.bfloat16()
        return make_linear(kind, weight, None), weight.float()
    rows, columns = (128, 128) if kind == "block" else (1, size)
    scale = values.unflatten(2, (-1, columns)).unflatten(1, (-1, rows)).abs().amax(dim=(2, 4)) / FP8_MAX
    # Unequal scales, so that a wrong one is noticed.
    scale *= torch.rand_like(scale) + 1
    full = scale.repeat_interleave(rows, 1).repeat_interleave(columns, 2)
    weight = (values / full).to(FP8_DTYPE)
    return make_linear(kind, weight, scale), weight.float() * full


def make(kind: str, sizes: Sizes) -> Layer:
    gate_up, gate_up_values = make_weights(kind, sizes.num_experts, 2 * sizes.intermediate, sizes.hidden)
    down, down_values = make_weights(kind, sizes.num_experts, sizes.hidden, sizes.intermediate)
    return Layer(gate_up, down, gate_up_values, down_values)


def route(num_rows: int, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs, weights, experts and residual; rows share experts."""
    x, residual = (torch.randn(num_rows, sizes.hidden, device="cuda").bfloat16() for _ in range(2))
    scores = torch.rand(num_rows, sizes.num_experts, device="cuda")
    scores[:, : sizes.num_chosen // 2] += 0.5
    weights, experts = scores.topk(sizes.num_chosen)
    return x, weights / weights.sum(dim=-1, keepdim=True), experts.int(), residual


def expected(
    layer: Layer, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    out = residual.float()
    for row in range(len(x)):
        for share, expert in zip(weights[row], experts[row].tolist(), strict=True):
            gate, up = (layer.gate_up_values[expert] @ x[row].float()).chunk(2)
            out[row] += share * (layer.down_values[expert] @ (F.silu(gate) * up))
    return out


def run(
    layer: Layer, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    from tandem.engine.layers.experts.few_rows import FewRowsExperts

    kernel = FewRowsExperts(x.device)
    assert kernel.fits(len(x), experts.shape[1], layer.down)
    return kernel.forward(x, weights, experts, *layer.given(), residual.clone())


def is_close(actual: torch.Tensor, correct: torch.Tensor) -> bool:
    return bool((actual - correct).abs().max() <= MAX_ERROR * correct.abs().max())


@pytest.fixture(autouse=True)
def exact_products() -> None:
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize(
    ("name", "kind"),
    [(n, k) for n in SIZES for k in KINDS if k != "block" or SIZES[n].hidden % 128 == SIZES[n].intermediate % 128 == 0],
)
def test_forward(name: str, kind: str) -> None:
    sizes = SIZES[name]
    layer = make(kind, sizes)
    for num_rows in (1, 2, 3, 4, 7, 8):
        routed = route(num_rows, sizes)
        assert is_close(run(layer, *routed), expected(layer, *routed))


def make_shared(kind: str, sizes: Sizes, num_parts: int) -> tuple[SharedExpert, torch.Tensor, torch.Tensor]:
    """Return a shared expert as large as some others, and its matrices' values in float32."""
    size, values, linears = num_parts * sizes.intermediate, [], list[LinearBase]()
    for out, num_in in ((2 * size, sizes.hidden), (sizes.hidden, size)):
        expert, full = make_weights(kind, 1, out, num_in)
        linear: LinearBase
        quantization, device = KINDS[kind], torch.device("cuda", 0)
        if quantization is None:
            linear = Linear([out], num_in, False, torch.bfloat16, device)
        else:
            linear = Fp8Linear(["shared"], [out], num_in, False, quantization, torch.bfloat16, device)
            assert expert.scale is not None
            linear.scale = expert.scale[0].contiguous()
        linear.weight = expert.weight[0]
        linears.append(linear)
        values.append(full[0])
    return SharedExpert(linears[0], linears[1], None), values[0], values[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "num_parts"), [("60 experts", 2), ("30B-A3B", 1), ("OLMoE", 4)])
def test_shared_expert(name: str, num_parts: int, kind: str) -> None:
    from tandem.engine.layers.experts.few_rows import FewRowsExperts

    sizes = SIZES[name]
    layer = make(kind, sizes)
    shared, gate_up_values, down_values = make_shared(kind, sizes, num_parts)
    kernel = FewRowsExperts(torch.device("cuda", 0))
    assert kernel.fits_shared(shared, layer.down)
    for num_rows in (1, 3, 8):
        x, weights, experts, residual = route(num_rows, sizes)
        gate, up = (x.float() @ gate_up_values.t()).chunk(2, dim=-1)
        correct = expected(layer, x, weights, experts, residual) + (F.silu(gate) * up) @ down_values.t()
        actual = kernel.forward(x, weights, experts, *layer.given(), residual.clone(), shared=shared)
        assert is_close(actual, correct)
        assert torch.equal(kernel.forward(x, weights, experts, *layer.given(), residual.clone(), shared=shared), actual)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_size(kind: str) -> None:
    sizes = SIZES["30B-A3B"]
    layer = make(kind, sizes)
    x, weights, experts, residual = route(5, sizes)
    x *= torch.tensor([[1e8], [1e-8], [0.0], [1.0], [300.0]], device="cuda").bfloat16()
    x[3, 7] = 2e5
    routed = x, weights, experts, torch.zeros_like(residual)
    for actual, correct in zip(run(layer, *routed), expected(layer, *routed), strict=True):
        assert is_close(actual, correct)


@pytest.mark.parametrize("kind", KINDS)
def test_result_depends_on_the_row_alone(kind: str) -> None:
    sizes = SIZES["30B-A3B"]
    layer = make(kind, sizes)
    routed = route(8, sizes)
    first = run(layer, *routed)
    for _ in range(100):
        assert torch.equal(run(layer, *routed), first)
    for own in range(8):
        others = route(8, sizes)
        for tensor, given in zip(others, routed, strict=True):
            tensor[own] = given[own]
        assert torch.equal(run(layer, *others)[own], first[own])


@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_experts_add_up(kind: str) -> None:
    from tandem.engine.layers.experts.few_rows import FewRowsExperts

    sizes = SIZES["OLMoE"]
    layer = make(kind, sizes)
    x, weights, experts, residual = route(5, sizes)
    experts[0] = torch.arange(8)
    kernel = FewRowsExperts(x.device)
    out = residual.clone()
    kernel.forward(x, weights, experts, *layer.given(0, 40), out)
    before = out.clone()
    kernel.forward(x, weights, experts, *layer.given(40), out, first_expert=40)
    # The first row chose none of the second part.
    assert torch.equal(out[0], before[0]) and not torch.equal(out[1:], before[1:])
    before = out.clone()
    kernel.forward(x, weights, experts, *layer.given(), out, first_expert=64)
    assert torch.equal(out, before)
    correct = expected(layer, x, weights, experts, residual)
    # The sum is rounded once more.
    assert (out - correct).abs().max() <= 2 * MAX_ERROR * correct.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_chain_of_layers_in_a_graph(kind: str) -> None:
    """Kernels of consecutive layers overlap; each must wait for its inputs."""
    from tandem.engine.layers.experts.few_rows import FewRowsExperts
    from tandem.engine.layers.experts.router_kernel import RouterKernel
    from tandem.engine.layers.norm import Norm

    sizes = SIZES["OLMoE"]
    layers = [make(kind, sizes) for _ in range(4)]
    norm = Norm(torch.ones(sizes.hidden, device="cuda").bfloat16(), 1e-6)
    routers = [torch.randn(sizes.num_experts, sizes.hidden, device="cuda").bfloat16() for _ in layers]
    routing = Routing("softmax", sizes.num_chosen, normalize=True)
    given = torch.randn(4, sizes.hidden, device="cuda").bfloat16()
    router_kernel, experts_kernel = RouterKernel(given.device), FewRowsExperts(given.device)

    def forward(wait: bool) -> torch.Tensor:
        x = given.clone()
        for layer, router in zip(layers * 4, routers * 4, strict=True):
            routed = router_kernel.route(x, norm, router, routing)
            if wait:
                torch.cuda.synchronize()
            experts_kernel.forward(routed.normed, routed.weights, routed.experts, *layer.given(), x)
            if wait:
                torch.cuda.synchronize()
        return x

    forward(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward(wait=False)
    for _ in range(20):
        given.normal_()
        graph.replay()
        assert torch.equal(out, forward(wait=True))


def test_unfit_sizes() -> None:
    from tandem.engine.layers.experts.few_rows import FewRowsExperts

    kernel = FewRowsExperts(torch.device("cuda", 0))

    def fits(num_rows: int = 8, hidden: int = 128, intermediate: int = 64, num_chosen: int = 2) -> bool:
        down = ExpertLinear(2, [hidden], intermediate, None, torch.bfloat16, torch.device("cuda"))
        return kernel.fits(num_rows, num_chosen, down)

    assert fits()
    assert not fits(num_rows=9) and not fits(num_chosen=17)
    assert not fits(hidden=96) and not fits(hidden=8256) and not fits(intermediate=24)
