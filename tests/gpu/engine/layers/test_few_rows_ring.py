"""Products of few tokens by a ring in shared memory, against plain float32."""

import pytest
import torch

from tandem.engine.layers.fp8 import FP8_MAX
from tandem.engine.layers.fp8_linear import Fp8Linear
from tandem.engine.layers.linear import Linear, LinearBase
from tandem.engine.layers.norm import Norm
from tandem.engine.models.quantization import Quantization

EPS = 1e-6
MAX_ERROR = 6e-3
KINDS: dict[str, Quantization | None] = {
    "plain": None,
    "channel": Quantization(),
    "block": Quantization("block", "group"),
}
# Of Qwen3-30B-A3B, GLM-4.7-Flash, and a vocabulary.
SIZES = [(5120, 2048), (2048, 4096), (5120, 768), (2048, 5120), (128, 128), (102_400, 512)]


def make(kind: str, num_out: int, num_in: int, has_bias: bool = False) -> tuple[LinearBase, torch.Tensor]:
    """Return a matrix and its values in float32."""
    device, quantization = torch.device("cuda", 0), KINDS[kind]
    values = torch.randn(num_out, num_in, device=device) * num_in**-0.5
    linear: LinearBase
    if quantization is None:
        linear = Linear([num_out], num_in, has_bias, torch.bfloat16, device)
        linear.weight.copy_(values)
        full = linear.weight.float()
    else:
        linear = Fp8Linear(["matrix"], [num_out], num_in, has_bias, quantization, torch.bfloat16, device)
        rows, columns = (128, 128) if linear.is_block else (1, num_in)
        scale = values.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).abs().amax(dim=(1, 3)) / FP8_MAX
        # Unequal scales, so that a wrong one is noticed.
        scale *= torch.rand_like(scale) + 1
        whole = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        linear.weight.copy_(values / whole)
        linear.scale.copy_(scale)
        full = linear.weight.float() * whole
    if linear.bias is not None:
        linear.bias.normal_()
    return linear, full


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
def test_products(num_out: int, num_in: int, kind: str) -> None:
    from tandem.engine.layers.few_rows_ring import FewRowsRing

    ring = FewRowsRing(torch.device("cuda", 0), 132)
    linear, values = make(kind, num_out, num_in, has_bias=num_out == 128)
    norm = Norm(torch.randn(num_in, device="cuda").bfloat16(), EPS)
    bias = 0.0 if linear.bias is None else linear.bias.float()
    for num_tokens in (1, 2, 3, 8):
        plan = ring.plan(num_tokens, [linear])
        assert plan is not None
        x, out = rows(num_tokens, num_in), rows(num_tokens, num_out)
        expected = out.float() + x.float() @ values.t() + bias
        ring.launch(plan, x, [linear], [out], None, add=True)
        assert is_close(out, expected)
        ring.launch(plan, x, [linear], [out], norm, add=False)
        assert is_close(out, normed(x, norm) @ values.t() + bias)


@pytest.mark.parametrize(("sizes", "num_in"), [((3072, 576), 2048), ((768, 576), 2048), ((8, 16), 64)])
def test_two_matrices(sizes: tuple[int, int], num_in: int) -> None:
    from tandem.engine.layers.cuda_ops import CudaOps

    ops = CudaOps(torch.device("cuda", 0))
    made = [make("plain", size, num_in) for size in sizes]
    linears = [linear for linear, _ in made]
    norm = Norm(torch.randn(num_in, device="cuda").bfloat16(), EPS)
    for num_tokens in (1, 4, 7, 8, 9):
        x = rows(num_tokens, num_in)
        for out, (linear, values) in zip(ops.norm_linears(x, norm, linears), made, strict=True):
            assert out.shape == (num_tokens, len(linear.weight))
            assert is_close(out, normed(x, norm) @ values.t())


@pytest.mark.parametrize("kind", KINDS)
def test_result_depends_on_the_token_alone(kind: str) -> None:
    from tandem.engine.layers.cuda_ops import CudaOps

    ops = CudaOps(torch.device("cuda", 0))
    linear, _ = make(kind, 5120, 2048)
    norm = Norm(torch.randn(2048, device="cuda").bfloat16(), EPS)
    x = rows(8, 2048)
    first = ops.norm_linear(x, norm, linear)
    for _ in range(100):
        assert torch.equal(ops.norm_linear(x, norm, linear), first)
    for own in range(8):
        others = rows(8, 2048)
        others[own] = x[own]
        assert torch.equal(ops.norm_linear(others, norm, linear)[own], first[own])


@pytest.mark.parametrize("kind", KINDS)
def test_chain_in_a_graph(kind: str) -> None:
    """Kernels overlap; each must wait for its inputs."""
    from tandem.engine.layers.cuda_ops import CudaOps

    ops = CudaOps(torch.device("cuda", 0))
    ups, downs = ([make(kind, *size)[0] for _ in range(4)] for size in ((4096, 1024), (1024, 4096)))
    norm = Norm(torch.ones(1024, device="cuda").bfloat16(), EPS)
    given = rows(4, 1024)

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
