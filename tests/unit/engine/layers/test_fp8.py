"""Expansion of FP8 weights by their scales."""

import pytest
import torch

from tandem.engine.layers.fp8 import FP8_DTYPE, dequantize
from tandem.engine.models.quantization import BLOCK


@pytest.mark.parametrize("out_size", [1, 2, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("in_size", [1, BLOCK, 2 * BLOCK + 3])
def test_each_number_has_its_block_s_scale(out_size: int, in_size: int) -> None:
    weight = torch.ones(out_size, in_size).to(FP8_DTYPE)
    scale = torch.rand(-(-out_size // BLOCK), -(-in_size // BLOCK))
    expanded = dequantize(weight, scale)
    assert expanded.shape == weight.shape
    rows, columns = torch.arange(out_size) // BLOCK, torch.arange(in_size) // BLOCK
    torch.testing.assert_close(expanded, scale[rows][:, columns])


def test_each_number_has_its_row_s_scale() -> None:
    weight = torch.full((3, 2 * BLOCK), 2.0).to(FP8_DTYPE)
    scale = torch.tensor([[1.0], [2.0], [3.0]])
    torch.testing.assert_close(dequantize(weight, scale), (2 * scale).expand(3, 2 * BLOCK))
