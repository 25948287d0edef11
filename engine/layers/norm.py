from typing import NamedTuple

import torch
import torch.nn.functional as F


class Norm(NamedTuple):
    """
    Attributes:
        weight: (size,).
    """

    weight: torch.Tensor
    eps: float


class QkNorm(NamedTuple):
    """
    Attributes:
        weight: (2, head_dim), row 0 for queries, row 1 for keys.
    """

    weight: torch.Tensor
    eps: float


class WholeNorm(NamedTuple):
    """A norm across the numbers of all ranks.

    Attributes:
        norm: weights of this rank's numbers.
        size: numbers of all ranks.
        num_copies: ranks that have the same number.
    """

    norm: Norm
    size: int
    num_copies: int


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS normalization of the last dimension, y = weight * x / rms(x).

    Formula: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467. Rounded to x's dtype before the weight is
    applied, as in Hugging Face's implementation.

    Args:
        x: (..., size).
        weight: (..., size), of x's dtype.
        eps: added to the mean square.
    """
    return weight * F.rms_norm(x, x.shape[-1:], eps=eps)
