"""A layer's operations on one rank of several."""

from collections.abc import Callable, Sequence

import torch

from tandem.engine.collectives.base import Collectives
from tandem.engine.layers.experts.base import Experts
from tandem.engine.layers.linear import LinearBase
from tandem.engine.layers.norm import Norm, WholeNorm
from tandem.engine.layers.ops import LayerOps


class RankedOps(LayerOps):
    """Adds the partial sums of all ranks, once behind attention and once behind each MLP.

    Inputs and residuals are equal on all ranks, and so are results.
    """

    def __init__(self, inner: LayerOps, collectives: Collectives) -> None:
        """Args: inner: computes on this rank."""
        self._inner = inner
        self._collectives = collectives

    def around(self, wrapped: Callable[[LayerOps], LayerOps]) -> "RankedOps":
        """Returns operations that compute on this rank with what `wrapped` makes of the inner ones."""
        return RankedOps(wrapped(self._inner), self._collectives)

    def norm_linear(
        self, x: torch.Tensor, norm: Norm, linear: LinearBase, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._inner.norm_linear(x, norm, linear, out)

    def norm_linears(self, x: torch.Tensor, norm: Norm, linears: Sequence[LinearBase]) -> list[torch.Tensor]:
        return self._inner.norm_linears(x, norm, linears)

    def norm_gated(self, x: torch.Tensor, norm: Norm, linear: LinearBase) -> torch.Tensor:
        return self._inner.norm_gated(x, norm, linear)

    def linear_add(self, x: torch.Tensor, linear: LinearBase, residual: torch.Tensor) -> torch.Tensor:
        if not linear.is_partial:
            return self._inner.linear_add(x, linear, residual)
        return self._reduced(self._inner.linear(x, linear), residual)

    def gated_mlp(self, x: torch.Tensor, norm: Norm, gate_up: LinearBase, down: LinearBase) -> torch.Tensor:
        return self._reduced(self._inner.gated(x, norm, gate_up, down), x)

    def mixture(
        self, x: torch.Tensor, norm: Norm, experts: Experts, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        residual = x if residual is None else residual
        # Kernels of experts add to a tensor.
        return self._reduced(self._inner.mixture(x, norm, experts, torch.zeros_like(x)), residual)

    def captures(self, experts: Experts) -> bool:
        return self._inner.captures(experts)

    def normalize(self, x: torch.Tensor, norm: Norm) -> None:
        self._inner.normalize(x, norm)

    def normalize_across(self, x: torch.Tensor, norm: WholeNorm) -> None:
        numbers = x.float()
        squares = self._collectives.all_reduce(numbers.square().sum(-1, keepdim=True))
        mean = squares / (norm.num_copies * norm.size)
        x.copy_((numbers * torch.rsqrt(mean + norm.norm.eps)).to(x.dtype) * norm.norm.weight)

    def _reduced(self, partial: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._collectives.all_reduce_add(partial, residual)
