"""The router against plain torch, for few and many rows and every kind of scores."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tandem.engine.layers.norm import Norm
from tandem.engine.models.experts import Routing

if TYPE_CHECKING:
    from tandem.engine.layers.experts.router_kernel import RouterKernel

EPS = 1e-6
MAX_ERROR = 1e-5
# x's norm may round differently, by one unit in the last place.
MAX_NORM_ERROR = 2**-7

ROUTINGS: dict[str, dict[str, Any]] = {
    "softmax": {"scoring": "softmax", "num_chosen": 8, "normalize": False},
    "normalized softmax": {"scoring": "softmax", "num_chosen": 8, "normalize": True},
    "sigmoid": {"scoring": "sigmoid", "num_chosen": 8, "normalize": True, "scaling": 2.5},
    "groups": {"scoring": "sigmoid", "num_chosen": 8, "normalize": True, "num_groups": 8, "num_groups_used": 4},
    "one group": {"scoring": "sigmoid", "num_chosen": 4, "normalize": False, "num_groups": 4, "num_groups_used": 1},
}


def make(num_rows: int, hidden_size: int, num_experts: int) -> tuple[torch.Tensor, Norm, torch.Tensor, torch.Tensor]:
    x = torch.randn(num_rows, hidden_size, device="cuda").bfloat16()
    norm = Norm(torch.rand(hidden_size, device="cuda").bfloat16() + 0.5, EPS)
    router = (torch.randn(num_experts, hidden_size, device="cuda") * hidden_size**-0.5).bfloat16()
    return x, norm, router, torch.randn(num_experts, device="cuda") * 0.3


def scores(logits: torch.Tensor, routing: Routing, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each expert's score, and the score for the choice, -inf if its group is not used. float64."""
    if routing.scoring == "softmax":
        score = logits.softmax(dim=-1)
        return score, score
    score = logits.sigmoid()
    for_choice = (score + bias).unflatten(-1, (routing.num_groups, -1))
    best_groups = for_choice.topk(2, dim=-1).values.sum(dim=-1).topk(routing.num_groups_used, dim=-1).indices
    is_used = torch.zeros(for_choice.shape[:2], dtype=torch.bool, device="cuda").scatter_(1, best_groups, True)
    return score, for_choice.masked_fill(~is_used[..., None], -torch.inf).flatten(1)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize(("hidden_size", "num_experts"), [(2048, 128), (4096, 8), (896, 60), (7168, 256), (64, 512)])
def test_route(hidden_size: int, num_experts: int, name: str) -> None:
    from tandem.engine.layers.experts.router_kernel import RouterKernel

    routing = Routing(**ROUTINGS[name])
    num_candidates = num_experts * routing.num_groups_used // routing.num_groups
    if num_experts % routing.num_groups or num_experts < 2 * routing.num_groups or num_candidates < routing.num_chosen:
        routing = replace(routing, num_groups=1, num_groups_used=1)
    kernel = RouterKernel(torch.device("cuda", 0))
    for num_rows in (1, 3, 8, 9, 64, 65, 250, 1000):
        check(kernel, routing, *make(num_rows, hidden_size, num_experts))


def check(
    kernel: "RouterKernel",
    routing: Routing,
    x: torch.Tensor,
    norm: Norm,
    router: torch.Tensor,
    bias: torch.Tensor,
) -> None:
    normed, weights, experts = kernel.route(x, norm, router, routing, bias)
    exact = x.double() * (x.double().square().mean(dim=-1, keepdim=True) + EPS).rsqrt() * norm.weight.double()
    assert ((normed.double() - exact).abs() <= MAX_NORM_ERROR * exact.abs()).all()
    score, for_choice = scores(normed.double() @ router.double().t(), routing, bias.double())
    index = experts.long()
    assert all(len(set(row)) == routing.num_chosen for row in experts.tolist())
    # Near ties may fall either way.
    assert (for_choice.gather(1, index) - for_choice.topk(routing.num_chosen).values).abs().max() < MAX_ERROR
    expected = score.gather(1, index)
    if routing.normalize:
        expected /= expected.sum(dim=-1, keepdim=True)
    assert (weights - expected * routing.scaling).abs().max() < MAX_ERROR * routing.scaling


@pytest.mark.parametrize("inputs", ["static", "token", "group"])
@pytest.mark.parametrize(("hidden_size", "num_experts"), [(2048, 128), (2048, 60), (7168, 256), (128, 512), (8320, 8)])
def test_quantized_rows(hidden_size: int, num_experts: int, inputs: Any) -> None:
    from tandem.engine.layers.experts.router_kernel import RouterKernel
    from tandem.engine.layers.fp8_quantize import quantize_rows

    kernel = RouterKernel(torch.device("cuda", 0))
    routing = Routing("softmax", 8, normalize=True)
    input_scale = torch.full((1,), 0.02, device="cuda") if inputs == "static" else None
    # More rows of larger sizes are normalized by other kernels than without quantization.
    for num_rows in (1, 13, 64, 65, 121, 128) if hidden_size == 2048 else (1, 13, 64):
        x, norm, router, _ = make(num_rows, hidden_size, num_experts)
        x[0] *= 1e-12
        normed, weights, experts = kernel.route(x, norm, router, routing)
        quantized, *routed = kernel.route_quantized(x, norm, router, routing, inputs, input_scale)
        assert torch.equal(routed[0], weights) and torch.equal(routed[1], experts)
        expected = quantize_rows(normed, inputs, input_scale)
        assert quantized.num_tokens == num_rows and quantized.numbers.shape == expected.numbers.shape
        assert quantized.scales.stride() == expected.scales.stride()
        assert torch.equal(quantized.scales[:num_rows], expected.scales[:num_rows])
        assert torch.equal(
            quantized.numbers[:num_rows].view(torch.uint8), expected.numbers[:num_rows].view(torch.uint8)
        )


@pytest.mark.parametrize("num_rows", [5, 100])
def test_ties_go_to_the_lower_expert(num_rows: int) -> None:
    from tandem.engine.layers.experts.router_kernel import RouterKernel

    x, norm, router, _ = make(num_rows, 256, 4)
    _, weights, experts = RouterKernel(x.device).route(
        x, norm, router.repeat_interleave(16, dim=0), Routing("softmax", 8, normalize=True)
    )
    assert torch.equal(experts % 16, torch.arange(8, dtype=torch.int32, device="cuda").expand(num_rows, 8))
    assert (weights - 1 / 8).abs().max() < MAX_ERROR


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("num_rows", [8, 40, 200])
def test_result_depends_on_the_row_alone(num_rows: int, name: str) -> None:
    from tandem.engine.layers.experts.router_kernel import RouterKernel

    x, norm, router, bias = make(num_rows, 2048, 128)
    kernel = RouterKernel(x.device)
    routing = Routing(**ROUTINGS[name])
    first = kernel.route(x, norm, router, routing, bias)
    for _ in range(100):
        for before, again in zip(first, kernel.route(x, norm, router, routing, bias), strict=True):
            assert torch.equal(before, again)
    own = num_rows // 2
    others = torch.randn_like(x) * 3
    others[own] = x[own]
    for before, again in zip(first, kernel.route(others, norm, router, routing, bias), strict=True):
        assert torch.equal(before[own], again[own])


@pytest.mark.parametrize("num_rows", [6, 100])
def test_counts_and_padding_in_a_graph(num_rows: int) -> None:
    from tandem.engine.layers.experts.router_kernel import RouterKernel

    x, norm, router, _ = make(num_rows, 2048, 128)
    kernel = RouterKernel(x.device)
    routing = Routing("softmax", 8, normalize=True)
    counts = torch.zeros(128, dtype=torch.int64, device="cuda")
    counted_rows = torch.zeros(3, dtype=torch.int32, device="cuda")
    kernel.route(x, norm, router, routing, None, counts, counted_rows)
    assert not counts.any()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routed = kernel.route(x, norm, router, routing, None, counts, counted_rows)
    expected = torch.zeros_like(counts)
    for first_end, begin, end in ((num_rows, 0, 0), (3, 0, 0), (0, 0, 0), (1, 3, 5), (0, 4, num_rows)):
        x.normal_()
        counted_rows.copy_(torch.tensor((first_end, begin, end)))
        graph.replay()
        is_real = torch.zeros(num_rows, dtype=torch.bool, device="cuda")
        is_real[:first_end] = is_real[begin:end] = True
        for real, alone in zip(routed, kernel.route(x, norm, router, routing), strict=True):
            assert torch.equal(real[is_real], alone[is_real])
        assert (routed.weights[~is_real] == 0).all() and (routed.experts[~is_real] == 128).all()
        for counted in (routed.experts[:first_end], routed.experts[begin:end]):
            expected += counted.flatten().bincount(minlength=128)
        assert torch.equal(counts, expected)


def test_unfit_routers() -> None:
    from tandem.engine.layers.experts.router_kernel import RouterKernel

    kernel = RouterKernel(torch.device("cuda", 0))
    groups = Routing("sigmoid", 8, has_bias=True, num_groups=64, num_groups_used=8)
    assert kernel.fits(512, 2048, Routing("softmax", 32)) and kernel.fits(512, 2048, replace(groups, num_groups=32))
    assert not kernel.fits(513, 2048, Routing("softmax", 8)) and not kernel.fits(512, 2048, Routing("softmax", 33))
    assert not kernel.fits(512, 2064, Routing("softmax", 8)) and not kernel.fits(512, 2048, groups)
    # With all groups used, they change nothing.
    assert kernel.fits(512, 2048, replace(groups, num_groups_used=64))
    assert not kernel.fits(512, 2048, replace(groups, scoring="softmax", num_groups=8, num_groups_used=4))
    assert not kernel.fits(512, 2048, replace(groups, num_groups=8, num_groups_used=4, num_ranked=1))
    assert not kernel.fits(512, 2048, Routing("softmax", 8, has_bias=True))
