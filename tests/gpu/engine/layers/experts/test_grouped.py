"""Grouped experts against every pair by itself in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tandem.engine.layers.experts.linear import ExpertLinear
from tandem.engine.layers.experts.tiles import Kind, Tile
from tandem.engine.layers.fp8 import FP8_MAX, as_quantized
from tandem.engine.models.quantization import Quantization
from tests.gpu.engine.layers.experts.test_alignment import DEVICE, choose

SCHEMES = {
    "plain": None,
    "token": Quantization("channel", "token"),
    "static": Quantization("channel", "static"),
    "block": Quantization("block", "group"),
}
Both = tuple[ExpertLinear, ExpertLinear]
# Outputs of gate and up, and of down, are rounded to bfloat16, and the sum once more.
MAX_ERROR = 6e-3
# If the largest of a pair's numbers is rounded to its neighbor, the scale differs by 2^-8. Then a sixteenth of the
# numbers are rounded to the next FP8 number, which is a sixteenth away.
MAX_ERROR_FP8 = 2.5e-2


def make(scheme: str, num_experts: int, out_sizes: list[int], in_size: int) -> ExpertLinear:
    linear = ExpertLinear(num_experts, out_sizes, in_size, SCHEMES[scheme], torch.bfloat16, DEVICE)
    numbers = torch.randn(linear.weight.shape, device=DEVICE)
    if linear.scale is None:
        linear.weight.copy_(numbers * in_size**-0.5)
        return linear
    linear.weight.copy_((100 * numbers).clamp(-FP8_MAX, FP8_MAX))
    linear.scale.uniform_(0.5, 2.0).mul_(in_size**-0.5 / 100)
    for name, parameter in linear.stacked_parameters("experts"):
        if name.endswith("input_scale"):
            parameter.fill_(4 / FP8_MAX)
    linear.loaded()
    return linear


def make_both(scheme: str, num_experts: int, hidden_size: int, size: int) -> Both:
    return make(scheme, num_experts, [size, size], hidden_size), make(scheme, num_experts, [hidden_size], size)


def rounded(x: torch.Tensor, linear: ExpertLinear) -> torch.Tensor:
    return x if linear.inputs is None else as_quantized(x.float(), linear.inputs, linear.input_scale).double()


def sums(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: ExpertLinear,
    down: ExpertLinear,
    first_expert: int = 0,
) -> torch.Tensor:
    """Return the weighted sums of each token's local experts, (num_tokens, hidden_size) float64."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
    inputs = rounded(x.double(), gate_up)
    for expert in range(gate_up.num_experts):
        tokens, places = (experts == first_expert + expert).nonzero(as_tuple=True)
        gate, up = (inputs[tokens] @ gate_up.of_expert(expert).double().t()).chunk(2, dim=-1)
        h = rounded((F.silu(gate) * up).bfloat16().double(), down)
        of_pairs = h @ down.of_expert(expert).double().t()
        out.index_add_(0, tokens, of_pairs * weights[tokens, places].double()[:, None])
    return out


def route(num_tokens: int, num_experts: int, k: int, routing: str) -> tuple[torch.Tensor, torch.Tensor]:
    experts = choose(num_tokens, num_experts, k, routing)
    return torch.rand(num_tokens, k, device=DEVICE).softmax(-1), experts


def check(actual: torch.Tensor, expected: torch.Tensor, scheme: str) -> None:
    bound = MAX_ERROR if scheme == "plain" else MAX_ERROR_FP8
    assert (actual.double() - expected).norm() < bound * expected.norm()
    # Per token, so that large tokens do not hide errors in others.
    assert ((actual.double() - expected).norm(dim=1) <= 2 * bound * expected.norm(dim=1)).all()


def run(x: torch.Tensor, routed: tuple[torch.Tensor, torch.Tensor], both: Both, first_expert: int = 0) -> torch.Tensor:
    """Return the sums, without a residual."""
    from tandem.engine.layers.experts.grouped import GroupedExperts

    return GroupedExperts(DEVICE).forward(x, *routed, *both, torch.zeros_like(x), first_expert)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("num_tokens", [1, 9, 17, 64, 129, 256, 700])
@pytest.mark.parametrize(("num_experts", "k", "hidden_size", "size"), [(16, 4, 256, 384), (8, 2, 1024, 640)])
@pytest.mark.parametrize("routing", ["uniform", "skewed", "same"])
def test_experts_of_every_routing(
    scheme: str, num_tokens: int, num_experts: int, k: int, hidden_size: int, size: int, routing: str
) -> None:
    """Some experts have no row, some one, and some more than a tile holds."""
    torch.manual_seed(0)
    both = make_both(scheme, num_experts, hidden_size, size)
    x = torch.randn(num_tokens, hidden_size, device=DEVICE).bfloat16()
    routed = route(num_tokens, num_experts, k, routing)
    check(run(x, routed, both), sums(x, *routed, *both), scheme)


@pytest.mark.parametrize(("scheme", "hidden_size", "size"), [("plain", 192, 16), ("plain", 64, 80), ("token", 192, 48)])
@pytest.mark.parametrize("num_tokens", [5, 100])
def test_sizes_that_tiles_do_not_divide(scheme: str, hidden_size: int, size: int, num_tokens: int) -> None:
    torch.manual_seed(0)
    both = make_both(scheme, 4, hidden_size, size)
    x = torch.randn(num_tokens, hidden_size, device=DEVICE).bfloat16()
    routed = route(num_tokens, 4, 2, "uniform")
    check(run(x, routed, both), sums(x, *routed, *both), scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("num_tokens", [16, 300])
def test_sizes_of_a_model(scheme: str, num_tokens: int) -> None:
    torch.manual_seed(0)
    both = make_both(scheme, 32, 2048, 768)
    x = torch.randn(num_tokens, 2048, device=DEVICE).bfloat16()
    routed = route(num_tokens, 32, 8, "uniform")
    check(run(x, routed, both), sums(x, *routed, *both), scheme)


def test_the_sum_is_added_to_the_residual_in_place() -> None:
    from tandem.engine.layers.experts.grouped import GroupedExperts

    torch.manual_seed(0)
    both = make_both("plain", 8, 1536, 128)
    x, residual = (torch.randn(33, 1536, device=DEVICE).bfloat16() for _ in range(2))
    routed = route(33, 8, 2, "uniform")
    expected = residual.double() + sums(x, *routed, *both)
    assert GroupedExperts(DEVICE).forward(x, *routed, *both, residual) is residual
    check(residual, expected, "plain")


@pytest.mark.parametrize("scheme", ["plain", "token", "block"])
@pytest.mark.parametrize("num_tokens", [9, 200])
def test_experts_elsewhere_contribute_nothing(scheme: str, num_tokens: int) -> None:
    """Slices of the experts add up to all of them, and a token without any of them keeps its residual."""
    torch.manual_seed(0)
    both = make_both(scheme, 6, 256, 256)
    x = torch.randn(num_tokens, 256, device=DEVICE).bfloat16()
    weights, experts = route(num_tokens, 16, 4, "uniform")
    actual = run(x, (weights, experts), both, first_expert=5)
    check(actual, sums(x, weights, experts, *both, first_expert=5), scheme)
    is_elsewhere = ((experts < 5) | (experts >= 11)).all(dim=1)
    assert is_elsewhere.any() and not actual[is_elsewhere].any() and actual[~is_elsewhere].all(dim=1).all()


@pytest.mark.parametrize("scheme", ["plain", "token", "block"])
@pytest.mark.parametrize("num_tokens", [31, 600])
def test_a_hundred_runs_have_the_same_bits(scheme: str, num_tokens: int) -> None:
    torch.manual_seed(0)
    both = make_both(scheme, 16, 512, 256)
    x = torch.randn(num_tokens, 512, device=DEVICE).bfloat16()
    routed = route(num_tokens, 16, 4, "skewed")
    first = run(x, routed, both)
    for _ in range(100):
        assert torch.equal(run(x, routed, both), first)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("num_tokens", [10, 48, 200, 700])
def test_other_rows_do_not_change_a_row(scheme: str, num_tokens: int) -> None:
    """A row's bits are the same wherever it lies in a tile, and whatever the others choose and contain."""
    torch.manual_seed(0)
    both = make_both(scheme, 16, 512, 256)
    x = torch.randn(num_tokens, 512, device=DEVICE).bfloat16()
    routed = route(num_tokens, 16, 4, "uniform")
    first = run(x, routed, both)
    for routing in ("uniform", "skewed", "same"):
        others = torch.randn_like(x), *route(num_tokens, 16, 4, routing)
        for row in (0, num_tokens // 2, num_tokens - 1):
            for place in (row, num_tokens - 1 - row):
                mixed, weights, experts = (t.clone() for t in others)
                for of_all, of_row in ((mixed, x), (weights, routed[0]), (experts, routed[1])):
                    of_all[place] = of_row[row]
                assert torch.equal(run(mixed, (weights, experts), both)[place], first[row])


@pytest.mark.parametrize("scheme", ["plain", "token", "block"])
@pytest.mark.parametrize("num_tokens", [16, 250])
def test_layers_in_a_graph(scheme: str, num_tokens: int) -> None:
    """Overlapping kernels compute the same as one at a time, for every routing."""
    from tandem.engine.layers.experts.grouped import GroupedExperts

    torch.manual_seed(0)
    grouped = GroupedExperts(DEVICE)
    layers = [make_both(scheme, 16, 512, 256) for _ in range(3)]
    weights, experts = route(num_tokens, 16, 4, "uniform")

    def forward(x: torch.Tensor, *, waits: bool) -> torch.Tensor:
        for both in layers:
            x = grouped.forward(x, weights, experts, *both, x.clone())
            if waits:
                torch.cuda.synchronize()
        return x

    static = torch.randn(num_tokens, 512, device=DEVICE).bfloat16()
    forward(static, waits=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward(static, waits=False)
    for routing in ("uniform", "skewed", "same"):
        weights.copy_(torch.rand_like(weights))
        experts.copy_(choose(num_tokens, 16, 4, routing))
        expected = forward(static, waits=True)
        for _ in range(5):
            graph.replay()
            assert torch.equal(out, expected)
            assert torch.equal(forward(static, waits=False), expected)


TILES: list[tuple[Kind, int, Tile, Tile]] = [
    (kind, rows, *both)
    for rows in (16, 32, 64, 128)
    for kind, both in (
        ("plain", (Tile(64, 128, 2, 4), Tile(64, 128, 3, 4))),
        ("plain", (Tile(128, 64, 3, 8), Tile(128, 64, 3, 8))),
        ("channel", (Tile(64, 256, 2, 4), Tile(64, 128, 4, 4))),
        ("channel", (Tile(128, 128, 3, 8), Tile(128, 128, 3, 8))),
        ("block", (Tile(64, 128, 3, 4), Tile(64, 128, 3, 4))),
        ("block", (Tile(128, 128, 3, 8), Tile(128, 128, 3, 8))),
    )
]


def values(x: Any) -> torch.Tensor:
    """Return a kernel's input in float64."""
    if isinstance(x, torch.Tensor):
        return x.double()
    scales = x.scales[: x.num_tokens].double()
    return (x.numbers[: x.num_tokens].double().unflatten(-1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)


@pytest.mark.parametrize(("kind", "rows", "of_gate_up", "of_down"), TILES)
def test_every_tile(kind: Kind, rows: int, of_gate_up: Tile, of_down: Tile) -> None:
    """Each product by itself, from the inputs as they were quantized."""
    from tandem.engine.layers.experts.grouped import GroupedExperts, quantized

    torch.manual_seed(0)
    grouped, (gate_up, down) = GroupedExperts(DEVICE), make_both("token" if kind == "channel" else kind, 5, 640, 384)
    for num_tokens in (3, 150):
        x = torch.randn(num_tokens, 640, device=DEVICE).bfloat16()
        weights, experts = route(num_tokens, 5, 2, "skewed")
        aligned = grouped.align(experts, 5, rows)
        inputs = quantized(x, gate_up)
        h = grouped.gate_up(inputs, gate_up, aligned, 2, rows, of_gate_up)
        pair_inputs = quantized(h, down)
        y = grouped.down(pair_inputs, down, aligned, rows, of_down)
        actual = grouped.combine(y, weights, experts, torch.zeros_like(x), 5)
        pairs = aligned.pairs.long()
        of_place = experts.flatten()[pairs]
        exact_h, exact_y = torch.empty_like(h, dtype=torch.float64), torch.empty_like(y, dtype=torch.float64)
        for expert in range(5):
            places = (of_place == expert).nonzero().flatten()
            gate, up = (values(inputs)[pairs[places] // 2] @ gate_up.of_expert(expert).double().t()).chunk(2, dim=-1)
            exact_h[places] = F.silu(gate) * up
            exact_y[pairs[places]] = values(pair_inputs)[places] @ down.of_expert(expert).double().t()
        check(h, exact_h, "plain")
        check(y, exact_y, "plain")
        check(actual, (y.double().unflatten(0, (num_tokens, 2)) * weights.double()[..., None]).sum(1), "plain")


def test_matrices_that_fit() -> None:
    from tandem.engine.layers.experts.grouped import GroupedExperts

    grouped = GroupedExperts(DEVICE)
    gate_up, _ = make_both("plain", 2, 128, 48)
    assert grouped.fits(gate_up)
    assert not grouped.fits(make_both("plain", 2, 128, 40)[0])
    gate_up.weight = gate_up.weight.float()
    assert not grouped.fits(gate_up)


@pytest.mark.parametrize("k", [2, 3])
def test_more_pairs_than_counters_hold(k: int) -> None:
    from tandem.engine.layers.experts.alignment import MAX_PAIRS
    from tandem.engine.layers.experts.grouped import GroupedExperts

    torch.manual_seed(0)
    gate_up, down = make_both("plain", 4, 128, 48)
    num_tokens = 2 * MAX_PAIRS // k + 5
    x = torch.randn(num_tokens, 128, device=DEVICE).bfloat16()
    weights, experts = route(num_tokens, 4, k, "uniform")
    actual = GroupedExperts(DEVICE).forward(x, weights, experts, gate_up, down, torch.zeros_like(x))
    check(actual, sums(x, weights, experts, gate_up, down), "plain")
