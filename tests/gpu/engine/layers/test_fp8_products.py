"""FP8 products of every kernel against quantized inputs and weights in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tandem.engine.layers.fp8 import as_quantized, dequantize
from tandem.engine.layers.fp8_linear import LIBRARY_BLOCKS_MULTIPLE, Fp8Linear, library_has_blocks
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.product_tiles import FEW_TOKENS
from tandem.engine.models.quantization import BLOCK
from tests.gpu.engine.layers.test_fp8_quantize import make_linear

EPS = 1e-6
KINDS = [("channel", "token"), ("channel", "static"), ("block", "group")]
SIZES = [(256, 128), (1024, 1024), (896, 4864), (4096, 6144), (4096, 17152), (14336, 4096)]
# Sums are rounded once to bfloat16; tensor cores add slightly less precisely than float32.
MAX_ERROR = 6e-3
HAS_BLOCKS = torch.cuda.is_available() and library_has_blocks(
    torch.cuda.get_device_capability(), torch.version.cuda or ""
)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def product(x: torch.Tensor, linear: Fp8Linear, *, is_quantized: bool) -> torch.Tensor:
    weight = dequantize(linear.weight, linear.scale).double()
    if is_quantized:
        x = as_quantized(x.float(), linear.inputs, linear.input_scale).double()
    return F.linear(x, weight, None if linear.bias is None else linear.bias.double())


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 16, 17, 33, 64, 127, 256, 515])
@pytest.mark.parametrize(("num_in", "num_out"), SIZES)
@pytest.mark.parametrize(("weights", "inputs"), KINDS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_with_fused_operations(
    num_tokens: int, num_in: int, num_out: int, weights: str, inputs: Any, has_bias: bool
) -> None:
    from tandem.engine.layers.cuda_ops import CudaOps

    torch.manual_seed(0)
    ops = CudaOps(torch.device("cuda", 0))
    linear = make_linear(weights, inputs, num_out, num_in, has_bias)
    x, residual = (torch.randn(num_tokens, size, device="cuda").bfloat16() for size in (num_in, num_out))
    norm = Norm(torch.randn(num_in, device="cuda").bfloat16(), EPS)
    # From Hopper on, small batches are not quantized.
    is_quantized = not ops._few_rows.fits(x, linear)
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS) * norm.weight.double()
    projected = product(normed, linear, is_quantized=is_quantized)
    # If two roundings differ, one FP8 step is a thirtieth of a number.
    bound = MAX_ERROR * (2 if is_quantized else 1)
    assert error(ops.norm_linear(x, norm, linear), projected) < bound
    gate, up = projected.chunk(2, dim=-1)
    assert error(ops.norm_gated(x, norm, linear), F.silu(gate) * up) < 2 * bound
    expected = product(x.double(), linear, is_quantized=is_quantized) + residual.double()
    assert error(ops.linear_add(x, linear, residual.clone()), expected) < bound


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 100, 256, 300])
@pytest.mark.parametrize("size", [1536, 9728])
@pytest.mark.parametrize(("weights", "inputs"), KINDS)
def test_a_gated_mlp(num_tokens: int, size: int, weights: str, inputs: Any) -> None:
    from tandem.engine.layers.cuda_ops import CudaOps

    torch.manual_seed(0)
    ops = CudaOps(torch.device("cuda", 0))
    gate_up, down = make_linear(weights, inputs, 2 * size, 512), make_linear(weights, inputs, 512, size)
    x = torch.randn(num_tokens, 512, device="cuda").bfloat16()
    norm = Norm(torch.randn(512, device="cuda").bfloat16(), EPS)
    is_quantized = not ops._few_rows.fits(x, gate_up)
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS) * norm.weight.double()
    projected = product(normed, gate_up, is_quantized=is_quantized)
    # Either the factors or the gated product are rounded to bfloat16.
    is_one_kernel = ops._products.tile(num_tokens, gate_up, is_gated=True) is not None
    gate, up = (projected if is_one_kernel else projected.bfloat16().double()).chunk(2, dim=-1)
    gated = F.silu(gate) * up
    gated = gated.bfloat16().double() if is_one_kernel else gated
    expected = product(gated, down, is_quantized=is_quantized) + x.double()
    assert error(ops.gated_mlp(x.clone(), norm, gate_up, down), expected) < 3 * MAX_ERROR


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 17, 100, 256, 1031])
@pytest.mark.parametrize(("num_in", "num_out"), SIZES)
@pytest.mark.parametrize(("weights", "inputs_by"), KINDS)
@pytest.mark.parametrize("adds", [True, False])
def test_both_kernels_at_every_size(
    num_tokens: int, num_in: int, num_out: int, weights: str, inputs_by: Any, adds: bool
) -> None:
    from tandem.engine.layers.fp8_products import multiply_by_library
    from tandem.engine.layers.fp8_quantize import quantize
    from tandem.engine.layers.products import Products

    torch.manual_seed(0)
    linear = make_linear(weights, inputs_by, num_out, num_in, bias=True)
    x = quantize(torch.randn(num_tokens, num_in, device="cuda").bfloat16(), linear)
    residual = torch.randn(num_tokens, num_out, device="cuda").bfloat16() if adds else None
    scales = x.scales[:num_tokens].double()
    numbers = x.numbers[:num_tokens].double().unflatten(-1, (scales.shape[1], -1))
    inputs = (numbers * scales[..., None]).flatten(1)
    assert linear.bias is not None
    expected = F.linear(inputs, dequantize(linear.weight, linear.scale).double(), linear.bias.double())
    if residual is not None:
        expected += residual.double()
    products = Products(torch.device("cuda", 0))
    tile = products.tile(num_tokens, linear)
    # Channel scales have no tile for many tokens and more than one wave of outputs.
    assert tile is not None or (num_tokens > FEW_TOKENS and not linear.is_block)
    if tile is not None:
        assert error(products.multiply(x, linear, tile, residual), expected) < MAX_ERROR
    has_blocks = HAS_BLOCKS and num_in // BLOCK % LIBRARY_BLOCKS_MULTIPLE == 0
    if not adds and (has_blocks or not linear.is_block):
        assert error(multiply_by_library(x, linear), expected) < MAX_ERROR


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 64, 300])
@pytest.mark.parametrize(("weights", "inputs"), KINDS)
def test_the_smallest_numbers_count(num_tokens: int, weights: str, inputs: Any) -> None:
    """FP8 numbers below 2^-6 are subnormal; no kernel may read them as zero."""
    from tandem.engine.layers.cuda_ops import CudaOps

    torch.manual_seed(0)
    ops = CudaOps(torch.device("cuda", 0))
    linear = make_linear(weights, inputs, 128, 512)
    linear.weight.copy_((torch.randint(-7, 8, (128, 512), device="cuda") * 2.0**-9).to(linear.weight.dtype))
    x = torch.randn(num_tokens, 512, device="cuda").bfloat16()
    expected = product(x.double(), linear, is_quantized=not ops._few_rows.fits(x, linear))
    residual = torch.zeros(num_tokens, 128, device="cuda").bfloat16()
    assert error(ops.linear_add(x, linear, residual), expected) < 2 * MAX_ERROR


@pytest.mark.skipif(not HAS_BLOCKS, reason="the library has no scales of blocks for this GPU or CUDA")
def test_padding_has_no_effect() -> None:
    """The library multiplies padding rows too."""
    from tandem.engine.layers.fp8_products import multiply_by_library
    from tandem.engine.layers.fp8_quantize import quantize

    linear = make_linear("block", "group", 256, 512)
    x = quantize(torch.randn(70, 512, device="cuda").bfloat16(), linear)
    first = multiply_by_library(x, linear)
    x.numbers.view(torch.uint8)[70:] = 0x7F
    x.scales[70:] = float("nan")
    assert torch.equal(multiply_by_library(x, linear), first) and first.isfinite().all()
