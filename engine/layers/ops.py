"""A layer's operations around attention: matrix products with their neighbors."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F

from tandem.engine.layers.experts.base import Experts
from tandem.engine.layers.experts.reference import mixture
from tandem.engine.layers.linear import LinearBase
from tandem.engine.layers.norm import Norm, WholeNorm, rms_norm


class LayerOps(ABC):
    """All tensors are (num_tokens, ...) of the model's dtype."""

    @abstractmethod
    def norm_linear(
        self, x: torch.Tensor, norm: Norm, linear: LinearBase, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the projections of rms_norm(x)."""

    def norm_linears(self, x: torch.Tensor, norm: Norm, linears: Sequence[LinearBase]) -> list[torch.Tensor]:
        """Returns norm_linear of each matrix."""
        return [self.norm_linear(x, norm, linear) for linear in linears]

    @abstractmethod
    def norm_gated(self, x: torch.Tensor, norm: Norm, linear: LinearBase) -> torch.Tensor:
        """Returns silu(first half of the projections of rms_norm(x)) * second half: (num_tokens, out_size / 2)."""

    @abstractmethod
    def linear_add(self, x: torch.Tensor, linear: LinearBase, residual: torch.Tensor) -> torch.Tensor:
        """Returns residual + projection of x; may overwrite `residual`."""

    def linear(self, x: torch.Tensor, linear: LinearBase) -> torch.Tensor:
        """Returns the projection of x."""
        return linear(x)

    def gated_mlp(self, x: torch.Tensor, norm: Norm, gate_up: LinearBase, down: LinearBase) -> torch.Tensor:
        """Returns x + projection `down` of norm_gated(x); may overwrite x."""
        return self.linear_add(self.norm_gated(x, norm, gate_up), down, x)

    def gated(self, x: torch.Tensor, norm: Norm, gate_up: LinearBase, down: LinearBase) -> torch.Tensor:
        """Returns the projection `down` of norm_gated(x)."""
        return self.linear(self.norm_gated(x, norm, gate_up), down)

    def gate(self, projected: torch.Tensor) -> torch.Tensor:
        """Returns silu(first half of each row) * second half, contiguous."""
        gate, up = projected.chunk(2, dim=-1)
        return F.silu(gate) * up

    def normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Returns rms_norm(x), contiguous."""
        return rms_norm(x, *norm)

    @abstractmethod
    def mixture(
        self, x: torch.Tensor, norm: Norm, experts: Experts, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns residual + the mixture of experts of rms_norm(x). Args: residual: may be overwritten; None: x."""

    def captures(self, experts: Experts) -> bool:
        """Returns whether a CUDA graph can capture `mixture`, because it never waits for the device."""
        return False

    def begin_compiling(self, linears: Iterable[LinearBase]) -> None:
        """Begins to compile kernels for these matrices in threads, before their weights are loaded."""
        return

    def leaving(self, num_multiprocessors: int) -> "LayerOps":
        """Returns operations whose products leave multiprocessors to kernels beside them, where they can."""
        return self

    @abstractmethod
    def normalize(self, x: torch.Tensor, norm: Norm) -> None:
        """Replaces x, (num_tokens, size), whose rows may be apart, by rms_norm(x)."""

    def normalize_across(self, x: torch.Tensor, norm: WholeNorm) -> None:
        """Replaces x by this rank's part of the norm across all ranks. Args: x: as for normalize."""
        self.normalize(x, norm.norm)


class TorchOps(LayerOps):
    """Rounds where Hugging Face's implementation does."""

    def norm_linear(
        self, x: torch.Tensor, norm: Norm, linear: LinearBase, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        projected = linear(rms_norm(x, *norm))
        return projected if out is None else out.copy_(projected)

    def norm_gated(self, x: torch.Tensor, norm: Norm, linear: LinearBase) -> torch.Tensor:
        return self.gate(linear(rms_norm(x, *norm)))

    def linear_add(self, x: torch.Tensor, linear: LinearBase, residual: torch.Tensor) -> torch.Tensor:
        return residual + linear(x)

    def mixture(
        self, x: torch.Tensor, norm: Norm, experts: Experts, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        return (x if residual is None else residual) + mixture(rms_norm(x, *norm), experts)

    def normalize(self, x: torch.Tensor, norm: Norm) -> None:
        x.copy_(rms_norm(x, *norm))
