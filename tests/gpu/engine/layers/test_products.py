"""The kernel for a moderate number of tokens against float64, in every tile and at model sizes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tandem.engine.layers.fp8 import dequantize
from tandem.engine.layers.fp8_linear import Fp8Linear
from tandem.engine.layers.linear import Linear, LinearBase
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.product_tiles import Kind, Tile
from tests.gpu.engine.layers.test_fp8_quantize import make_linear

EPS = 1e-6
NUM_TOKENS = (1, 17, 63, 64, 65, 127, 128, 129, 255, 256)
# Sums are rounded once to bfloat16; tensor cores add slightly less precisely than float32.
MAX_ERROR = 6e-3
TILES: list[tuple[Kind, bool, Tile]] = [
    ("plain", False, Tile(64, 64, 64, 8, 4)),
    ("plain", False, Tile(64, 64, 64, 8, 4, 2)),
    ("plain", False, Tile(64, 64, 64, 8, 4, 4)),
    ("plain", True, Tile(64, 64, 128, 4, 4)),
    ("plain", True, Tile(128, 128, 64, 4, 8)),
    ("channel", False, Tile(64, 64, 128, 8, 4)),
    ("channel", False, Tile(64, 64, 128, 6, 4)),
    ("channel", False, Tile(64, 64, 128, 8, 4, 2)),
    ("channel", False, Tile(128, 64, 128, 8, 4)),
    ("channel", False, Tile(128, 64, 128, 8, 4, 2)),
    ("channel", False, Tile(128, 64, 128, 8, 4, 4)),
    ("channel", False, Tile(128, 128, 128, 7, 8)),
    ("channel", True, Tile(64, 64, 128, 4, 4)),
    ("channel", True, Tile(128, 64, 128, 3, 8)),
    *(("block", False, Tile(64, outputs, 128, 6, 4)) for outputs in (32, 64, 128)),
    *(("block", False, Tile(128, outputs, 128, 4, 8)) for outputs in (32, 64, 128)),
]
# Matrix rows and columns, and whether products are gated.
MATRICES = {
    "0.6B qkv": (4096, 1024, False),
    "0.6B o": (1024, 2048, False),
    "0.6B gate_up": (6144, 1024, True),
    "0.6B down": (1024, 3072, False),
    "8B qkv": (6144, 4096, False),
    "8B o": (4096, 4096, False),
    "8B gate_up": (28672, 4096, True),
    "8B down": (4096, 14336, False),
    "odd gate_up": (17664, 896, True),
    "odd down": (896, 4864, False),
}


def make(kind: Kind, out_size: int, in_size: int, bias: bool = False) -> LinearBase:
    if kind != "plain":
        return make_linear(kind, "group" if kind == "block" else "token", out_size, in_size, bias)
    linear = Linear([out_size], in_size, bias, torch.bfloat16, torch.device("cuda", 0))
    linear.weight.normal_(0, in_size**-0.5)
    if linear.bias is not None:
        linear.bias.normal_()
    return linear


def inputs(linear: LinearBase, num_tokens: int) -> tuple[Any, torch.Tensor]:
    """Return the kernel's input, and its value in float64."""
    from tandem.engine.layers.fp8_quantize import quantize

    x = torch.randn(num_tokens, linear.weight.shape[1], device="cuda").bfloat16()
    if not isinstance(linear, Fp8Linear):
        return x, x.double()
    quantized = quantize(x, linear)
    scales = quantized.scales[:num_tokens].double()
    numbers = quantized.numbers[:num_tokens].double().unflatten(-1, (scales.shape[1], -1))
    return quantized, (numbers * scales[..., None]).flatten(1)


def check(
    actual: torch.Tensor, x: torch.Tensor, linear: LinearBase, *, is_gated: bool, residual: torch.Tensor | None
) -> None:
    weight = dequantize(linear.weight, linear.scale) if isinstance(linear, Fp8Linear) else linear.weight
    expected = F.linear(x, weight.double(), None if linear.bias is None else linear.bias.double())
    if is_gated:
        gate, up = expected.chunk(2, dim=-1)
        expected = F.silu(gate) * up
    if residual is not None:
        expected += residual.double()
    bound = (2 if is_gated else 1) * MAX_ERROR
    assert (actual.double() - expected).norm() < bound * expected.norm()
    # Per token, so that large tokens do not hide errors in others.
    assert ((actual.double() - expected).norm(dim=1) < 2 * bound * expected.norm(dim=1)).all()


@pytest.mark.parametrize(("kind", "is_gated", "tile"), TILES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("adds", [True, False])
def test_every_tile(kind: Kind, is_gated: bool, tile: Tile, has_bias: bool, adds: bool) -> None:
    from tandem.engine.layers.products import Products

    torch.manual_seed(0)
    products = Products(torch.device("cuda", 0))
    # An odd number of tiles; fewer steps than stages, as many, and more.
    for num_steps in (1, 3, tile.num_stages, 13):
        out_size, in_size = 3 * 128, tile.depth * tile.num_splits * num_steps
        linear = make(kind, 2 * out_size if is_gated else out_size, in_size, has_bias)
        for num_tokens in NUM_TOKENS:
            x, exact = inputs(linear, num_tokens)
            residual = torch.randn(num_tokens, out_size, device="cuda").bfloat16() if adds else None
            added = None if residual is None else residual.clone()
            actual = products.multiply(x, linear, tile, added, is_gated=is_gated)
            assert added is None or actual is added
            check(actual, exact, linear, is_gated=is_gated, residual=residual)


@pytest.mark.parametrize("kind", ["plain", "channel", "block"])
@pytest.mark.parametrize("matrix", MATRICES)
def test_the_chosen_tiles_at_sizes_of_models(kind: Kind, matrix: str) -> None:
    from tandem.engine.layers.products import Products

    torch.manual_seed(0)
    products = Products(torch.device("cuda", 0))
    num_rows, in_size, is_gated = MATRICES[matrix]
    linear = make(kind, num_rows, in_size)
    for num_tokens in NUM_TOKENS:
        tile = products.tile(num_tokens, linear, is_gated=is_gated)
        if tile is not None:
            x, exact = inputs(linear, num_tokens)
            actual = products.multiply(x, linear, tile, is_gated=is_gated)
            check(actual, exact, linear, is_gated=is_gated, residual=None)


def test_results_do_not_depend_on_earlier_launches() -> None:
    """Blocks that share a tile end in any order and leave no state behind."""
    from tandem.engine.layers.products import Products

    torch.manual_seed(0)
    products = Products(torch.device("cuda", 0))
    cases = []
    for kind, out_size, in_size, num_splits in (("channel", 4096, 4096, 2), ("channel", 1024, 3072, 4)):
        linear = make_linear(kind, "token", out_size, in_size)
        for num_tokens in (17, 64, 128):
            tile = Tile(64 if num_tokens <= 64 else 128, 64, 128, 6, 4, num_splits)
            x, _ = inputs(linear, num_tokens)
            cases.append((x, linear, tile, products.multiply(x, linear, tile)))
    for _ in range(20):
        for x, linear, tile, first in cases:
            assert torch.equal(products.multiply(x, linear, tile), first)


@pytest.mark.parametrize(
    ("kind", "num_tokens"),
    [("plain", 24), *(("channel", n) for n in (24, 64, 100, 200)), *(("block", n) for n in (24, 64, 100, 200))],
)
def test_layers_in_a_graph(kind: Kind, num_tokens: int) -> None:
    """Overlapping kernels compute the same as one at a time."""
    from tandem.engine.layers.cuda_ops import CudaOps

    torch.manual_seed(0)
    # Uses only Tandem's own kernels, which are deterministic.
    size, intermediate = 1024, 4096 if kind == "block" else 4608
    ops = CudaOps(torch.device("cuda", 0))
    layers = [
        (
            Norm(torch.randn(size, device="cuda").bfloat16(), EPS),
            make(kind, 2 * intermediate, size),
            make(kind, size, intermediate),
        )
        for _ in range(4)
    ]

    def run(x: torch.Tensor, *, waits: bool) -> torch.Tensor:
        for norm, gate_up, down in layers:
            x = ops.gated_mlp(x, norm, gate_up, down)
            if waits:
                torch.cuda.synchronize()
        return x

    prompts = [torch.randn(num_tokens, size, device="cuda").bfloat16() for _ in range(4)]
    expected = [run(x.clone(), waits=True) for x in prompts]
    static = prompts[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(static, waits=False)
    for _ in range(5):
        for x, result in zip(prompts, expected, strict=True):
            static.copy_(x)
            graph.replay()
            assert torch.equal(out, result)
            assert torch.equal(run(x.clone(), waits=False), result)
