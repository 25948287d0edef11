"""A layer's operations on rows that may have adapters."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tandem.engine.adapters.products import AdapterProducts
from tandem.engine.adapters.rows import AdapterRows
from tandem.engine.layers.experts.base import Experts
from tandem.engine.layers.linear import LinearBase
from tandem.engine.layers.norm import Norm, WholeNorm
from tandem.engine.layers.ops import LayerOps
from tandem.engine.layers.ranked_ops import RankedOps


class AdapterBatch(NamedTuple):
    """Adapters of a forward pass.

    Attributes:
        tokens: of all tokens.
        selected: of the rows that the last layer computes to the end.
    """

    products: AdapterProducts
    tokens: AdapterRows
    selected: AdapterRows


def with_adapters(ops: LayerOps, products: AdapterProducts, rows: AdapterRows) -> LayerOps:
    """Returns operations on tensors of these rows."""
    if isinstance(ops, RankedOps):
        # The products of adapters are parts of sums over ranks, as the base's.
        return ops.around(lambda inner: AdapterOps(inner, products, rows))
    return AdapterOps(ops, products, rows)


class AdapterOps(LayerOps):
    """Adds adapters to the projections that have them; all else is the inner operations'."""

    def __init__(self, inner: LayerOps, products: AdapterProducts, rows: AdapterRows) -> None:
        """Args: inner: of one rank alone; rows: of all tensors that come."""
        self._inner = inner.leaving(products.num_beside(len(rows.order)))
        self._products = products
        self._rows = rows

    def norm_linear(
        self, x: torch.Tensor, norm: Norm, linear: LinearBase, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if linear.adapters is None:
            return self._inner.norm_linear(x, norm, linear, out)
        projected = self.linear(self._inner.normed(x, norm), linear)
        return projected if out is None else out.copy_(projected)

    def norm_linears(self, x: torch.Tensor, norm: Norm, linears: Sequence[LinearBase]) -> list[torch.Tensor]:
        if all(linear.adapters is None for linear in linears):
            return self._inner.norm_linears(x, norm, linears)
        return super().norm_linears(x, norm, linears)

    def norm_gated(self, x: torch.Tensor, norm: Norm, linear: LinearBase) -> torch.Tensor:
        if linear.adapters is None:
            return self._inner.norm_gated(x, norm, linear)
        normed = self._inner.normed(x, norm)
        gated = self._products.gated(normed, linear, self._rows)
        if gated is not None:
            return gated
        shrunk = self._products.shrink(normed, linear.adapters, self._rows)
        projected = self._inner.linear(normed, linear)
        return self._products.expand_gated(shrunk, linear.adapters, self._rows, projected)

    def linear_add(self, x: torch.Tensor, linear: LinearBase, residual: torch.Tensor) -> torch.Tensor:
        if linear.adapters is None:
            return self._inner.linear_add(x, linear, residual)
        shrunk = self._products.shrink(x, linear.adapters, self._rows)
        out = self._inner.linear_add(x, linear, residual)
        self._products.expand(shrunk, linear.adapters, self._rows, out)
        return out

    def linear(self, x: torch.Tensor, linear: LinearBase) -> torch.Tensor:
        if linear.adapters is None:
            return self._inner.linear(x, linear)
        shrunk = self._products.shrink(x, linear.adapters, self._rows)
        out = self._inner.linear(x, linear)
        self._products.expand(shrunk, linear.adapters, self._rows, out)
        return out

    def gated_mlp(self, x: torch.Tensor, norm: Norm, gate_up: LinearBase, down: LinearBase) -> torch.Tensor:
        if gate_up.adapters is None:
            return self._inner.gated_mlp(x, norm, gate_up, down)
        return super().gated_mlp(x, norm, gate_up, down)

    def gated(self, x: torch.Tensor, norm: Norm, gate_up: LinearBase, down: LinearBase) -> torch.Tensor:
        if gate_up.adapters is None:
            return self._inner.gated(x, norm, gate_up, down)
        return super().gated(x, norm, gate_up, down)

    def mixture(
        self, x: torch.Tensor, norm: Norm, experts: Experts, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._inner.mixture(x, norm, experts, residual)

    def captures(self, experts: Experts) -> bool:
        return self._inner.captures(experts)

    def normalize(self, x: torch.Tensor, norm: Norm) -> None:
        self._inner.normalize(x, norm)

    def normalize_across(self, x: torch.Tensor, norm: WholeNorm) -> None:
        self._inner.normalize_across(x, norm)
