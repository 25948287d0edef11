"""The small computations of a layer, around its matrix products and its attention."""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from tandem.engine.layers.norm import rms_norm


class LayerOps(ABC):
    """All tensors are (num_tokens, ...) of the model's dtype."""

    @abstractmethod
    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """rms_norm of each row."""

    @abstractmethod
    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns rms_norm of x + residual, and x + residual; neither argument is to be used again."""

    @abstractmethod
    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """(num_tokens, 2 * size) to (num_tokens, size): silu of the first half times the second."""


class TorchOps(LayerOps):
    """In plain torch, with roundings where Hugging Face's implementation has them."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual + x
        return rms_norm(residual, weight, eps), residual

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
