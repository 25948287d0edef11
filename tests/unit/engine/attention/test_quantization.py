"""Conversion to and from the bytes of quantized pages."""

import math

import pytest
import torch

from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.quantization import Quantizer

LAYOUT = KvHeadLayout(1, 16, 1, 8, "float32", "float8_e4m3fn")
CPU = torch.device("cpu")


def through(numbers: list[float], scale: float = 1.0, dtype: str = "float32") -> list[float]:
    quantizer = Quantizer(KvHeadLayout(1, 16, 1, 8, dtype, "float8_e4m3fn"), scale, CPU)
    quantized = quantizer.quantized(torch.tensor([numbers]))
    assert quantized.dtype is torch.uint8 and quantized.shape == (1, len(numbers))
    back = quantizer.numbers(quantized)
    assert back.dtype is getattr(torch, dtype) and back.shape == quantized.shape
    return back[0].tolist()


def test_rounding_is_to_nearest_even() -> None:
    assert through([0.0, 1.0, 1.05, 1.07, 1.0625, 1.1875, -3.3]) == [0.0, 1.0, 1.0, 1.125, 1.0, 1.25, -3.25]
    # The smallest number, and a number nearer to 0.
    assert through([2.0**-9, 2.0**-10.1, -(2.0**-9)]) == [2.0**-9, 0.0, -(2.0**-9)]


@pytest.mark.parametrize("scale", [1.0, 0.25, 3.0])
def test_overflow_saturates(scale: float) -> None:
    too_large = [448.1 * scale, 480.0 * scale, 1e30, math.inf]
    largest = [448.0 * scale] * 4
    assert through(too_large, scale) == largest
    assert through([-x for x in too_large], scale) == [-x for x in largest]


def test_nan_stays_nan() -> None:
    assert all(map(math.isnan, through([math.nan, -math.nan])))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [1.0, 0.037, 5.5])
def test_error_is_at_most_a_sixteenth_at_any_scale(scale: float, dtype: str) -> None:
    numbers = (torch.randn(4000, generator=torch.Generator().manual_seed(0)).abs() + 0.02) * scale * 10
    back = torch.tensor(through(numbers.tolist(), scale, dtype))
    assert ((back - numbers).abs() / numbers).max() <= 1 / 16 + (1 / 256 if dtype == "bfloat16" else 1e-6)


def test_every_byte_round_trips() -> None:
    quantizer = Quantizer(LAYOUT, 0.3, CPU)
    every = torch.arange(256, dtype=torch.uint8)
    numbers = quantizer.numbers(every)
    is_nan = numbers.isnan()
    assert is_nan.sum() == 2 and numbers[~is_nan].isfinite().all()
    assert torch.equal(quantizer.quantized(numbers)[~is_nan], every[~is_nan])
