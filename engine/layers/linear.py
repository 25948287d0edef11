"""Projections."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
import torch.nn.functional as F


def empty_weight(out_size: int, in_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for F.linear's matrix, (out_size, in_size): on a GPU in the order of checkpoints, on a CPU with the
    numbers of one input side by side.

    On a CPU products with one row, or with four and more, take up to a sixth less time that way; with two rows they
    take a little more.
    """
    if device.type == "cuda":
        return torch.empty(out_size, in_size, dtype=dtype, device=device)
    return torch.empty(in_size, out_size, dtype=dtype, device=device).t()


class LinearBase(ABC):
    """One or more projections of the same input as one matrix, so that they take one product.

    Called with (..., in_size), returns (..., sum(out_sizes)) of the same dtype: the projections side by side.

    Attributes:
        weight: (sum(out_sizes), in_size), of whatever the kind of projection holds.
        bias: (sum(out_sizes),) of the model's dtype, or None.
    """

    def __init__(self, out_sizes: list[int], weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Args: out_sizes: of the projections, in order."""
        self._out_sizes = out_sizes
        self.weight = weight
        self.bias = bias

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """In plain torch."""

    def named_parameters(self, *names: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the matrix, (out_size, in_size), of the bias, (out_size,), and of whatever belongs to them, by the
        projections' names."""
        for name, weight in zip(names, self.weight.split(self._out_sizes), strict=True):
            yield f"{name}.weight", weight
        if self.bias is not None:
            for name, bias in zip(names, self.bias.split(self._out_sizes), strict=True):
                yield f"{name}.bias", bias

    @abstractmethod
    def loaded(self) -> None:
        """To be called once all parameters have their values."""


class Linear(LinearBase):
    """Weights of the inputs' dtype."""

    def __init__(
        self, out_sizes: list[int], in_size: int, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        """
        Args:
            out_sizes: of the projections, in order.
            bias: whether each projection has one.
        """
        weight = empty_weight(sum(out_sizes), in_size, dtype, device)
        super().__init__(out_sizes, weight, torch.empty(sum(out_sizes), dtype=dtype, device=device) if bias else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def loaded(self) -> None:
        """Nothing follows from them."""
