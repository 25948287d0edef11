"""FP8 numbers (float8_e4m3fn) with float32 scales, in plain torch.

A value is number * scale. Weight scales are per output, (out_size, 1), or per BLOCK x BLOCK, (out_size / BLOCK, in_size
/ BLOCK). Input scales are per token, (num_tokens, 1), or per BLOCK numbers of a token, (num_tokens, in_size / BLOCK).
"""

import torch

from tandem.engine.models.quantization import BLOCK, InputScales

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8_DTYPE).max
# Keeps the scale of zeros above zero.
SMALLEST_AMAX = 1e-10


def round_to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rounds x / scale to the nearest FP8 number, saturating. Args: scale: float32."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)


def quantize_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes (out_size, in_size) by row, with scales (out_size, 1) that map each row's largest to FP8's."""
    scale = weight.float().abs().amax(dim=1, keepdim=True).clamp_min(SMALLEST_AMAX) / FP8_MAX
    return round_to_fp8(weight, scale), scale


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns (out_size, in_size) float32. The last blocks may be smaller than others."""
    if scale.shape != (len(weight), 1):
        out_size, in_size = weight.shape
        scale = scale.repeat_interleave(BLOCK, 0)[:out_size].repeat_interleave(BLOCK, 1)[:, :in_size]
    return weight.float() * scale


def as_quantized(x: torch.Tensor, inputs: InputScales, static_scale: torch.Tensor | None) -> torch.Tensor:
    """Rounds inputs (..., in_size) as an FP8 product does. Args: static_scale: (1,) float32 for "static" inputs."""
    grouped = x.float().unflatten(-1, (-1, BLOCK)) if inputs == "group" else x.float()
    if inputs == "static":
        assert static_scale is not None
        scale = static_scale
    else:
        scale = grouped.abs().amax(dim=-1, keepdim=True).clamp_min(SMALLEST_AMAX) / FP8_MAX
    return (round_to_fp8(grouped, scale).float() * scale).view(x.shape).to(x.dtype)
