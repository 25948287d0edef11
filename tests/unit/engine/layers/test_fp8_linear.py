"""FP8 projections in plain torch, by hand, and rejected shapes."""

from typing import Any

import pytest
import torch

from tandem.engine.layers.fp8 import FP8_DTYPE, as_quantized, dequantize, quantize_channels
from tandem.engine.layers.fp8_linear import Fp8Linear, library_has_blocks
from tandem.engine.models.quantization import Quantization

CPU = torch.device("cpu")


def make(weights: Any, inputs: Any, out_sizes: list[int], in_size: int, bias: bool = False) -> Fp8Linear:
    names = [f"model.layers.0.{letter}_proj" for letter in "qkv"[: len(out_sizes)]]
    return Fp8Linear(names, out_sizes, in_size, bias, Quantization(weights, inputs), torch.float32, CPU)


def test_rounding() -> None:
    # Near 448, FP8's maximum, steps are 32; near 1 they are 1/8.
    x = torch.tensor([[448.0, 430.0, -1.06, 1.07, 2**-9, 2**-11, 0.0, 600.0]])
    rounded = as_quantized(x, "static", torch.ones(1))
    assert rounded.tolist() == [[448.0, 416.0, -1.0, 1.125, 2**-9, 0.0, 0.0, 448.0]]
    # A token's scale maps its largest number to FP8's largest; zeros stay zeros.
    x = torch.tensor([[1.0, -8.0, 0.5], [0.0, 0.0, 0.0]])
    assert torch.allclose(as_quantized(x, "token", None), x)
    x = torch.ones(1, 256) * torch.tensor([1000.0, 1e-3]).repeat_interleave(128)
    assert torch.allclose(as_quantized(x, "group", None), x)
    assert (as_quantized(x, "token", None)[0, 128:] == 0).all()


def test_weights_become_fp8_by_channel() -> None:
    weight = torch.tensor([[1.0, -2.0, 0.25], [0.0, 0.0, 0.0], [1e-4, 3e-5, 1e-4]])
    numbers, scale = quantize_channels(weight)
    assert numbers.dtype is FP8_DTYPE and scale.shape == (3, 1)
    assert numbers.float().abs().amax(1).tolist() == [448.0, 0.0, 448.0]
    assert torch.allclose(dequantize(numbers, scale), weight, rtol=1 / 16)


def test_blocks_have_scales_of_their_own() -> None:
    linear = make("block", "group", [256, 128], 256)
    linear.weight.copy_(torch.ones(384, 256).to(FP8_DTYPE))
    scales = torch.arange(1.0, 7.0).view(3, 2)
    for (name, parameter), scale in zip(
        [p for p in linear.named_parameters("q", "k") if p[0].endswith("scale")], scales.split([2, 1]), strict=True
    ):
        assert parameter.shape == scale.shape, name
        parameter.copy_(scale)
    x = torch.zeros(1, 256)
    x[0, 0], x[0, 200] = 1.0, 10.0
    expected = torch.tensor([1 + 20, 3 + 40, 5 + 60]).repeat_interleave(128).float()
    assert torch.allclose(linear(x)[0], expected)


def test_the_largest_of_several_static_scales_counts() -> None:
    linear = make("channel", "static", [16, 16], 16, bias=True)
    values = {"weight": 1.0, "weight_scale": 0.5, "bias": 3.0}
    for name, parameter in linear.named_parameters("q", "k"):
        kind = name.partition(".")[2]
        if kind == "input_scale":
            assert parameter.shape == ()
        parameter.copy_(torch.full(parameter.shape, values.get(kind, 1.0 if name[0] == "q" else 2.0)))
    linear.loaded()
    assert linear.input_scale is not None and linear.input_scale.tolist() == [2.0]
    # Under the smaller scale 600 would saturate at 448; under the larger it is 300, rounded to 288 or 304.
    x = torch.zeros(1, 16)
    x[0, 0] = 600.0
    assert linear(x)[0].tolist() == [0.5 * 2 * 304 + 3] * 32 or linear(x)[0].tolist() == [0.5 * 2 * 288 + 3] * 32


@pytest.mark.parametrize(
    ("capability", "cuda_version", "has_blocks"),
    [
        ((9, 0), "13.0", True),
        ((9, 0), "12.9", True),
        ((9, 0), "12.8", False),
        ((9, 0), "12.6", False),
        ((8, 9), "13.0", False),
        ((10, 0), "13.0", False),
    ],
)
def test_blocks_are_the_library_s_on_hopper_with_a_late_cuda(
    capability: tuple[int, int], cuda_version: str, has_blocks: bool
) -> None:
    """With an earlier CUDA torch raises, at the first prompt long enough for the library."""
    assert library_has_blocks(capability, cuda_version) is has_blocks


@pytest.mark.parametrize(
    ("weights", "inputs", "sizes", "in_size", "message"),
    [
        ("block", "group", [256, 64], 256, r"model.layers.0.k_proj is \(64, 256\), but blocks of 128x128"),
        (
            "block",
            "group",
            [256],
            192,
            r"q_proj is \(256, 192\), but blocks of 128x128 need multiples of 128",
        ),
        ("channel", "token", [24], 32, r"q_proj is \(24, 32\), but FP8 products need multiples of 16"),
    ],
)
def test_refuses_sizes(weights: Any, inputs: Any, sizes: list[int], in_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(weights, inputs, sizes, in_size)
