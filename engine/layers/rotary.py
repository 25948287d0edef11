"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""

import math
from functools import cached_property

import torch

from tandem.engine.models.rope import Llama3RopeScaling, RopeScaling, YarnRopeScaling


class RotaryEmbedding:
    """Cosines and sines of the angles position * theta^(-2i / head_dim), for i from 0 to head_dim / 2 - 1.

    YaRN multiplies both by its table_factor.

    Args:
        head_dim: the rotated dimensions, which may be part of a head.

    Attributes:
        cos, sin: (max_positions, head_dim // 2) float32.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        scaling: RopeScaling | None,
        max_positions: int,
        device: torch.device,
    ) -> None:
        # On the CPU, so that all workers' tables are bitwise equal.
        frequencies = rotary_frequencies(head_dim, theta, scaling)
        factor = float(scaling.table_factor) if isinstance(scaling, YarnRopeScaling) else 1.0
        angles = torch.arange(max_positions).float()[:, None] * frequencies  # (max_positions, head_dim // 2)
        self.cos = (angles.cos() * factor).to(device)
        self.sin = (angles.sin() * factor).to(device)

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
    """Returns x with each pair (x[i], x[i + head_dim/2]) rotated by its angle, as most Hugging Face checkpoints need.

    Args:
        x: (num_tokens, num_heads, head_dim).
        cos, sin: (num_tokens, 1, head_dim // 2) of x's dtype.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns x with each pair (x[2i], x[2i + 1]) rotated by its angle, as DeepSeek's decoupled rotation needs.

    Args:
        x: (num_tokens, num_heads, rope_dim), the rotated part of heads.
        cos, sin: (num_tokens, 1, rope_dim // 2) of x's dtype.
    """
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Returns (head_dim // 2,) float32, in radians per position."""
    # float, because torch takes no int of more than 64 bits.
    inverse = float(theta) ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if isinstance(scaling, YarnRopeScaling):
        return scale_yarn(inverse, theta, scaling)
    frequencies = 1.0 / inverse
    return frequencies if scaling is None else scale_llama3(frequencies, scaling)


def scale_yarn(inverse: torch.Tensor, theta: float, scaling: YarnRopeScaling) -> torch.Tensor:
    """Scales frequencies to longer contexts by YaRN.

    Pair i turns original_max_position_embeddings * frequency_i / (2 pi) times in an original context. Pairs that turn
    more than beta_fast times keep their frequency; below beta_slow times, it is divided by `factor`. Between the
    bounds the two are blended. Source: section 3.2 of Peng et al. 2023, https://arxiv.org/abs/2309.00071. As in the
    authors' code, the blend is linear in i, not in turns. Operations are in transformers' order, for equal bits.

    Args:
        inverse: (head_dim // 2,) float32, theta^(2i / head_dim).

    Returns:
        (head_dim // 2,) float32, in radians per position.
    """
    num_pairs = len(inverse)
    first, last = (_pair_that_turns(beta, theta, num_pairs, scaling) for beta in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # transformers bounds the last pair by dimensions, which are twice as many.
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    if first == last:
        last += 0.001
    unscaled_share = 1 - ((torch.arange(num_pairs).float() - first) / (last - first)).clamp(0.0, 1.0)
    return 1.0 / (float(scaling.factor) * inverse) * (1 - unscaled_share) + 1.0 / inverse * unscaled_share


def _pair_that_turns(times: float, theta: float, num_pairs: int, scaling: YarnRopeScaling) -> float:
    """Returns the pair, as a fraction, that turns so many times in an original context."""
    original = scaling.original_max_position_embeddings
    return 2 * num_pairs * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))


def scale_llama3(frequencies: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    """Scales frequencies, (head_dim // 2,) float32 in radians per position, to longer contexts as Llama 3.1 does.

    With wavelength = 2 pi / frequency and original = original_max_position_embeddings: wavelengths above original /
    low_freq_factor are stretched by `factor`; below original / high_freq_factor they stay. Between the bounds the two
    are blended linearly in original / wavelength. Source: `apply_scaling` in Meta's reference code,
    https://github.com/meta-llama/llama-models (models/llama3/model.py).
    """
    original = scaling.original_max_position_embeddings
    low, high, factor = (float(x) for x in (scaling.low_freq_factor, scaling.high_freq_factor, scaling.factor))
    wavelengths = 2 * math.pi / frequencies
    unscaled_share = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - unscaled_share) * frequencies / factor + unscaled_share * frequencies
