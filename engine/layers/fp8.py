"""FP8 numbers (float8_e4m3fn) with scales, in plain torch.

A number stands for itself times its scale: a scale of weights is for an output, (out_size, 1), or for a block of
BLOCK x BLOCK, (out_size / BLOCK, in_size / BLOCK); one of inputs for a token, (num_tokens, 1), or for BLOCK numbers of
one, (num_tokens, in_size / BLOCK). All are float32.
"""

import torch

from tandem.engine.models.quantization import BLOCK, InputScales

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8_DTYPE).max
# What is all zeros has a scale too.
SMALLEST_AMAX = 1e-10


def round_to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The FP8 numbers nearest to x / scale; what is beyond them becomes the largest.

    Args:
        scale: float32, broadcast against x.
    """
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)


def quantize_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out_size, in_size) as FP8 numbers, and their scales, (out_size, 1), by which the largest of each row is FP8's
    largest."""
    scale = weight.float().abs().amax(dim=1, keepdim=True).clamp_min(SMALLEST_AMAX) / FP8_MAX
    return round_to_fp8(weight, scale), scale


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What FP8 weights stand for: (out_size, in_size) float32. Args: scale: as in this file's heading."""
    if len(scale) != len(weight):
        scale = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * scale


def as_quantized(x: torch.Tensor, inputs: InputScales, static_scale: torch.Tensor | None) -> torch.Tensor:
    """What is left of inputs that are multiplied as FP8 numbers.

    Args:
        x: (..., in_size).
        static_scale: (1,) float32; None unless inputs are "static".

    Returns:
        Like x: each number rounded to FP8 under its scale.
    """
    grouped = x.float().unflatten(-1, (-1, BLOCK)) if inputs == "group" else x.float()
    if inputs == "static":
        assert static_scale is not None
        scale = static_scale
    else:
        scale = grouped.abs().amax(dim=-1, keepdim=True).clamp_min(SMALLEST_AMAX) / FP8_MAX
    return (round_to_fp8(grouped, scale).float() * scale).view(x.shape).to(x.dtype)
