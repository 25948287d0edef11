from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from tandem.engine.adapters.weights import AdapterWeights


def empty_weight(out_size: int, in_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocates F.linear's matrix, (out_size, in_size): row-major on a GPU, column-major on a CPU.

    On a CPU, column-major products take up to a sixth less time with one row or at least four, and slightly more with
    two.
    """
    if device.type == "cuda":
        return torch.empty(out_size, in_size, dtype=dtype, device=device)
    return torch.empty(in_size, out_size, dtype=dtype, device=device).t()


class LinearBase(ABC):
    """Projections of the same input, merged into one matrix and one product.

    Attributes:
        weight: (sum(out_sizes), in_size); the dtype depends on the subclass.
        bias: (sum(out_sizes),) of the model's dtype, or None.
        is_partial: True if the matrix has some of the whole's columns, so that results are one rank's partial sums.
        adds_bias: False if another rank adds the bias of a partial matrix.
        adapters: None if no adapter can change these projections.
    """

    is_partial: bool = False
    adds_bias: bool = True
    adapters: AdapterWeights | None = None

    def __init__(self, out_sizes: list[int], weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._out_sizes = out_sizes
        self.weight = weight
        self.bias = bias

    @property
    def out_sizes(self) -> Sequence[int]:
        """Outputs of each projection."""
        return self._out_sizes

    @property
    def in_size(self) -> int:
        return self.weight.shape[1]

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (..., in_size) to (..., sum(out_sizes)) of the same dtype, in plain torch."""

    def named_parameters(self, *names: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields views of weights (out_size, in_size), biases (out_size,) and other parameters, by name."""
        for name, weight in zip(names, self.weight.split(self._out_sizes), strict=True):
            yield f"{name}.weight", weight
        if self.bias is not None:
            for name, bias in zip(names, self.bias.split(self._out_sizes), strict=True):
                yield f"{name}.bias", bias

    def loaded(self) -> None:
        """Call once after all parameters are loaded."""
        if self.bias is not None and not self.adds_bias:
            self.bias.zero_()


class Linear(LinearBase):
    def __init__(
        self, out_sizes: list[int], in_size: int, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        weight = empty_weight(sum(out_sizes), in_size, dtype, device)
        super().__init__(out_sizes, weight, torch.empty(sum(out_sizes), dtype=dtype, device=device) if bias else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)
