"""What a layer computes around its attention: matrix products with the small things before and after them."""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from tandem.engine.layers.linear import LinearBase
from tandem.engine.layers.norm import Norm, rms_norm


class LayerOps(ABC):
    """All tensors are (num_tokens, ...) of the model's dtype."""

    @abstractmethod
    def norm_linear(
        self, x: torch.Tensor, norm: Norm, linear: LinearBase, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The projections of rms_norm(x). Args: out: where they go; None: new memory."""

    @abstractmethod
    def norm_gated(self, x: torch.Tensor, norm: Norm, linear: LinearBase) -> torch.Tensor:
        """silu of the first half of the projections of rms_norm(x) times the second: (num_tokens, out_size / 2)."""

    @abstractmethod
    def linear_add(self, x: torch.Tensor, linear: LinearBase, residual: torch.Tensor) -> torch.Tensor:
        """residual + the projection of x; `residual` is not to be used again."""

    def gated_mlp(self, x: torch.Tensor, norm: Norm, gate_up: LinearBase, down: LinearBase) -> torch.Tensor:
        """x + the projection `down` of norm_gated(x); `x` is not to be used again."""
        return self.linear_add(self.norm_gated(x, norm, gate_up), down, x)


class TorchOps(LayerOps):
    """In plain torch, with roundings where Hugging Face's implementation has them."""

    def norm_linear(
        self, x: torch.Tensor, norm: Norm, linear: LinearBase, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        projected = linear(rms_norm(x, *norm))
        return projected if out is None else out.copy_(projected)

    def norm_gated(self, x: torch.Tensor, norm: Norm, linear: LinearBase) -> torch.Tensor:
        gate, up = linear(rms_norm(x, *norm)).chunk(2, dim=-1)
        return F.silu(gate) * up

    def linear_add(self, x: torch.Tensor, linear: LinearBase, residual: torch.Tensor) -> torch.Tensor:
        return residual + linear(x)
