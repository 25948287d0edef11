"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""

import math
from functools import cached_property

import torch

from tandem.engine.models.rope import Llama3RopeScaling


class RotaryEmbedding:
    """Cosines and sines of the angles position * theta^(-2i / head_dim), for i from 0 to head_dim / 2 - 1.

    As in Hugging Face checkpoints, dimension i rotates with i + head_dim / 2, not i + 1.

    Attributes:
        cos, sin: (max_positions, head_dim // 2) float32.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        scaling: Llama3RopeScaling | None,
        max_positions: int,
        device: torch.device,
    ) -> None:
        # On the CPU, so that all workers' tables are bitwise equal.
        frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2).float() / head_dim))  # (head_dim // 2,)
        if scaling is not None:
            frequencies = scale_llama3(frequencies, scaling)
        angles = torch.arange(max_positions).float()[:, None] * frequencies  # (max_positions, head_dim // 2)
        self.cos = angles.cos().to(device)
        self.sin = angles.sin().to(device)

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Looks up the arguments of `rotate`.

        Args:
            positions: (num_tokens,) int64, each below max_positions.

        Returns:
            cos and sin, (num_tokens, 1, head_dim // 2) of dtype, rounded before use as in Hugging Face's
            implementation.
        """
        return self.cos[positions].to(dtype).unsqueeze(1), self.sin[positions].to(dtype).unsqueeze(1)


class Rotation:
    """
    Attributes:
        positions: (num_tokens,) integers, each below max_positions.
    """

    def __init__(self, tables: RotaryEmbedding, positions: torch.Tensor, dtype: torch.dtype) -> None:
        self.tables = tables
        self.positions = positions
        self._dtype = dtype

    def of(self, positions: torch.Tensor) -> "Rotation":
        return Rotation(self.tables, positions, self._dtype)

    @cached_property
    def cos_sin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Looked up once for all layers."""
        return self.tables.at(self.positions, self._dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns x with each pair (x[i], x[i + head_dim/2]) rotated by its angle.

    Args:
        x: (num_tokens, num_heads, head_dim).
        cos, sin: (num_tokens, 1, head_dim // 2) of x's dtype.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def scale_llama3(frequencies: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    """Scales frequencies, (head_dim // 2,) float32 in radians per position, to longer contexts as Llama 3.1 does.

    With wavelength = 2 pi / frequency and original = original_max_position_embeddings: wavelengths above original /
    low_freq_factor are stretched by `factor`; below original / high_freq_factor they stay. Between the bounds the two
    are blended linearly in original / wavelength. Source: `apply_scaling` in Meta's reference code,
    https://github.com/meta-llama/llama-models (models/llama3/model.py).
    """
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    unscaled_share = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - unscaled_share) * frequencies / scaling.factor + unscaled_share * frequencies
