"""Fused kernels against plain float32."""

import pytest
import torch

from tandem.engine.layers.linear import Linear
from tandem.engine.layers.norm import Norm, rms_norm
from tandem.engine.layers.ops import TorchOps

EPS = 1e-6


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 16, 17, 64, 100, 300, 2049])
@pytest.mark.parametrize(
    ("num_in", "num_out"),
    [(96, 48), (1024, 1024), (896, 4864), (4096, 6144), (4096, 9824), (14336, 4096), (1024, 19456)],
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_with_fused_operations(num_tokens: int, num_in: int, num_out: int, has_bias: bool) -> None:
    from tandem.engine.layers.cuda_ops import CudaOps

    device = torch.device("cuda", 0)
    ops, oracle = CudaOps(device), TorchOps()
    linear, exact = (Linear([num_out], num_in, has_bias, t, device) for t in (torch.bfloat16, torch.float64))
    linear.weight.normal_(0, num_in**-0.5)
    exact.weight.copy_(linear.weight)
    if linear.bias is not None and exact.bias is not None:
        linear.bias.normal_()
        exact.bias.copy_(linear.bias)
    x, residual = (torch.randn(num_tokens, size, device="cuda").bfloat16() for size in (num_in, num_out))
    norm = Norm(torch.randn(num_in, device="cuda").bfloat16(), EPS)
    exact_norm = Norm(norm.weight.double(), EPS)
    assert error(ops.norm_linear(x, norm, linear), oracle.norm_linear(x.double(), exact_norm, exact)) < 6e-3
    assert error(ops.norm_gated(x, norm, linear), oracle.norm_gated(x.double(), exact_norm, exact)) < 1e-2
    expected = oracle.linear_add(x.double(), exact, residual.double())
    assert error(ops.linear_add(x, linear, residual.clone()), expected) < 6e-3


def test_a_wide_matrix() -> None:
    """A vocabulary-sized matrix whose row count no tile divides."""
    from tandem.engine.layers.cuda_ops import CudaOps

    device = torch.device("cuda", 0)
    linear = Linear([151_669], 256, False, torch.bfloat16, device)
    linear.weight.normal_(0, 1 / 16)
    norm = Norm(torch.ones(256, device="cuda").bfloat16(), EPS)
    for num_tokens in (1, 8, 9):
        x = torch.randn(num_tokens, 256, device="cuda").bfloat16()
        expected = rms_norm(x.double(), norm.weight.double(), EPS) @ linear.weight.double().t()
        assert error(CudaOps(device).norm_linear(x, norm, linear), expected) < 6e-3
