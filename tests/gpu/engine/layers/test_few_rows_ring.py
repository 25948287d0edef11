"""Products of few tokens by a ring in shared memory, against plain float32."""

import pytest
import torch

from tandem.engine.layers.fp8 import dequantize
from tandem.engine.layers.linear import Linear
from tandem.engine.layers.norm import Norm
from tests.gpu.engine.layers.test_fp8_quantize import make_linear

EPS = 1e-6
MAX_ERROR = 6e-3
# Of Qwen3-30B-A3B, and vocabularies.
SIZES = [(5120, 2048), (2048, 4096), (102_400, 2048), (65_536, 512)]


def make(num_out: int, num_in: int, has_bias: bool = False) -> Linear:
    linear = Linear([num_out], num_in, has_bias, torch.bfloat16, torch.device("cuda", 0))
    linear.weight.normal_(0, num_in**-0.5)
    if linear.bias is not None:
        linear.bias.normal_()
    return linear


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.float()


def is_close(actual: torch.Tensor, correct: torch.Tensor) -> bool:
    return bool((actual - correct).norm() <= MAX_ERROR * correct.norm())


def rows(num: int, size: int) -> torch.Tensor:
    return torch.randn(num, size, device="cuda").bfloat16()


@pytest.fixture(autouse=True)
def exact_products() -> None:
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
def test_products(num_out: int, num_in: int, has_bias: bool) -> None:
    from tandem.engine.layers.few_rows_ring import FewRowsRing

    ring = FewRowsRing(torch.device("cuda", 0))
    linear = make(num_out, num_in, has_bias)
    norm = Norm(torch.randn(num_in, device="cuda").bfloat16(), EPS)
    bias = 0.0 if linear.bias is None else linear.bias.float()
    for num_tokens in (1, 2, 3, 8):
        plan = ring.plan(num_tokens, [linear])
        assert plan is not None
        x, out = rows(num_tokens, num_in), rows(num_tokens, num_out)
        expected = out.float() + x.float() @ linear.weight.float().t() + bias
        ring.launch(plan, x, [linear], [out], None, add=True)
        assert is_close(out, expected)
        ring.launch(plan, x, [linear], [out], norm, add=False)
        assert is_close(out, normed(x, norm) @ linear.weight.float().t() + bias)


@pytest.mark.parametrize("weights", ["channel", "block"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("num_out", "num_in"), [(5120, 2048), (2048, 4096), (2816, 4096)])
def test_fp8_weights(num_out: int, num_in: int, has_bias: bool, weights: str) -> None:
    from tandem.engine.layers.few_rows_ring import FewRowsRing

    ring = FewRowsRing(torch.device("cuda", 0))
    linear = make_linear(weights, "token" if weights == "channel" else "group", num_out, num_in, has_bias)
    weight = dequantize(linear.weight, linear.scale).t()
    norm = Norm(torch.randn(num_in, device="cuda").bfloat16(), EPS)
    bias = 0.0 if linear.bias is None else linear.bias.float()
    for num_tokens in (1, 2, 3, 8):
        plan = ring.plan(num_tokens, [linear])
        assert plan is not None
        x, out = rows(num_tokens, num_in), rows(num_tokens, num_out)
        expected = out.float() + x.float() @ weight + bias
        ring.launch(plan, x, [linear], [out], None, add=True)
        assert is_close(out, expected)
        ring.launch(plan, x, [linear], [out], norm, add=False)
        assert is_close(out, normed(x, norm) @ weight + bias)


@pytest.mark.parametrize(("sizes", "num_in"), [((3072, 576), 2048), ((768, 576), 2048), ((8, 16), 64)])
def test_two_matrices(sizes: tuple[int, int], num_in: int) -> None:
    from tandem.engine.layers.cuda_ops import CudaOps

    ops = CudaOps(torch.device("cuda", 0))
    linears = [make(size, num_in) for size in sizes]
    norm = Norm(torch.randn(num_in, device="cuda").bfloat16(), EPS)
    for num_tokens in (1, 4, 7, 8, 9):
        x = rows(num_tokens, num_in)
        for out, linear in zip(ops.norm_linears(x, norm, linears), linears, strict=True):
            assert out.shape == (num_tokens, len(linear.weight))
            assert is_close(out, normed(x, norm) @ linear.weight.float().t())


def test_result_depends_on_the_token_alone() -> None:
    from tandem.engine.layers.cuda_ops import CudaOps

    ops, linear = CudaOps(torch.device("cuda", 0)), make(5120, 2048)
    norm = Norm(torch.randn(2048, device="cuda").bfloat16(), EPS)
    x = rows(8, 2048)
    first = ops.norm_linear(x, norm, linear)
    for _ in range(100):
        assert torch.equal(ops.norm_linear(x, norm, linear), first)
    for own in range(8):
        others = rows(8, 2048)
        others[own] = x[own]
        assert torch.equal(ops.norm_linear(others, norm, linear)[own], first[own])


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_chain_in_a_graph(num_tokens: int) -> None:
    """Kernels overlap; each must wait for its inputs."""
    from tandem.engine.layers.cuda_ops import CudaOps

    ops = CudaOps(torch.device("cuda", 0))
    ups, downs = ([make(*size) for _ in range(4)] for size in ((4096, 2048), (2048, 4096)))
    norm = Norm(torch.ones(2048, device="cuda").bfloat16(), EPS)
    given = rows(num_tokens, 2048)

    def forward(wait: bool) -> torch.Tensor:
        x = given.clone()
        for up, down in zip(ups * 4, downs * 4, strict=True):
            hidden = ops.norm_linear(x, norm, up)
            if wait:
                torch.cuda.synchronize()
            x = ops.linear_add(hidden, down, x)
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
