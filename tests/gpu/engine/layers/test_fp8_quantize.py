"""Input quantization, alone and fused, against plain torch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tandem.engine.layers.fp8 import as_quantized
from tandem.engine.layers.fp8_linear import Fp8Linear
from tandem.engine.layers.norm import Norm
from tandem.engine.models.quantization import BLOCK, Quantization

EPS = 1e-6


def make_linear(weights: Any, inputs: Any, out_size: int, in_size: int, bias: bool = False) -> Fp8Linear:
    """Make random weights with scales that differ by row."""
    device = torch.device("cuda", 0)
    names = ["model.layers.0.mlp.up_proj"]
    linear = Fp8Linear(names, [out_size], in_size, bias, Quantization(weights, inputs), torch.bfloat16, device)
    # Includes subnormal FP8 numbers, below 2^-6 in steps of 2^-9.
    numbers = torch.randn(out_size, in_size, device=device) * torch.logspace(-3, 2, out_size, device=device)[:, None]
    linear.weight.copy_(numbers.clamp(-448, 448).to(linear.weight.dtype))
    linear.scale.uniform_(0.5, 2.0).mul_(in_size**-0.5 / 100)
    if linear.bias is not None:
        linear.bias.normal_()
    for name, parameter in linear.named_parameters(*names):
        if name.endswith("input_scale"):
            parameter.fill_(8 / 448)
    linear.loaded()
    return linear


@pytest.mark.parametrize("num_tokens", [1, 2, 17, 255, 300])
@pytest.mark.parametrize("size", [128, 896, 4096, 14336])
@pytest.mark.parametrize(("weights", "inputs"), [("channel", "token"), ("channel", "static"), ("block", "group")])
@pytest.mark.parametrize("before", ["nothing", "norm", "gate"])
def test_quantised_inputs(num_tokens: int, size: int, weights: str, inputs: Any, before: str) -> None:
    from tandem.engine.layers.fp8_quantize import quantize

    torch.manual_seed(0)
    linear = make_linear(weights, inputs, 128, size)
    x = torch.randn(num_tokens, size * (2 if before == "gate" else 1), device="cuda").bfloat16()
    x[0] *= 1e-30
    norm = Norm(torch.randn(size, device="cuda").bfloat16(), EPS) if before == "norm" else None
    exact = x.double()
    if norm is not None:
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPS) * norm.weight.double()
    if before == "gate":
        exact = F.silu(exact[:, :size]) * exact[:, size:]
    actual = quantize(x, linear, norm, is_gated=before == "gate")
    assert actual.num_tokens == num_tokens and actual.numbers.dtype is torch.float8_e4m3fn
    scales = actual.scales[:num_tokens]
    assert scales.shape == (num_tokens, size // BLOCK if inputs == "group" else 1)
    stands_for = actual.numbers[:num_tokens].float().unflatten(-1, (scales.shape[1], -1)) * scales[..., None]
    expected = as_quantized(exact.float(), inputs, linear.input_scale).view_as(stands_for)
    # A different summation order may change a scale's last bit and the rounding of ties.
    is_other = (stands_for - expected).abs() > 1e-5 * expected.abs()
    assert is_other.float().mean() < 0.02
    assert (stands_for - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize("inputs", ["static", "token", "group"])
def test_normalized_rows_and_their_numbers(inputs: Any) -> None:
    from tandem.engine.layers.cuda_norm import rms_norm
    from tandem.engine.layers.fp8_quantize import normalize_and_quantize, quantize_rows

    torch.manual_seed(0)
    x = torch.randn(37, 2048, device="cuda").bfloat16()
    norm = Norm(torch.randn(2048, device="cuda").bfloat16(), EPS)
    input_scale = torch.full((1,), 0.02, device="cuda") if inputs == "static" else None
    normed, quantized = normalize_and_quantize(x, norm, inputs, input_scale)
    expected = rms_norm(x, norm)
    assert (normed - expected).norm() <= 1e-3 * expected.norm()
    again = quantize_rows(normed, inputs, input_scale)
    assert torch.equal(quantized.scales[:37], again.scales[:37])
    assert torch.equal(quantized.numbers[:37].view(torch.uint8), again.numbers[:37].view(torch.uint8))


def test_zeros_are_zeros() -> None:
    from tandem.engine.layers.fp8_quantize import quantize

    for weights, inputs in (("channel", "token"), ("block", "group")):
        linear = make_linear(weights, inputs, 128, 256)
        quantized = quantize(torch.zeros(3, 256, device="cuda").bfloat16(), linear)
        assert (quantized.numbers[:3].float() == 0).all() and (quantized.scales[:3] > 0).all()
