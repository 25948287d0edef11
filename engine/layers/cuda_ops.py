"""Layer operations by fused kernels. Needs CUDA."""

import copy
from collections.abc import Iterable, Sequence

import flashinfer
import torch

from tandem.engine.layers.balanced_products import BalancedProducts
from tandem.engine.layers.cuda_norm import rms_norm
from tandem.engine.layers.experts.base import Experts
from tandem.engine.layers.experts.cuda_experts import CudaExperts
from tandem.engine.layers.few_rows import FewRows
from tandem.engine.layers.fp8_linear import Fp8Linear
from tandem.engine.layers.fp8_products import Fp8Products
from tandem.engine.layers.fp8_quantize import Quantized, quantize
from tandem.engine.layers.gated_products import GatedProducts
from tandem.engine.layers.linear import LinearBase
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.ops import LayerOps
from tandem.engine.layers.products import Products


class CudaOps(LayerOps):
    """Chooses Tandem's own kernels where they are faster.

    FP8 weights multiply few tokens in bfloat16; for more tokens the inputs are quantized too.
    """

    def __init__(self, device: torch.device) -> None:
        self._few_rows = FewRows(device)
        self._balanced = BalancedProducts(device)
        self._products = Products(device)
        self._gated = GatedProducts(device)
        self._fp8 = Fp8Products(device, self._products)
        self._experts = CudaExperts(device)

    def norm_linear(
        self, x: torch.Tensor, norm: Norm, linear: LinearBase, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self._few_rows.fits(x, linear):
            return self._few_rows.norm_linear(x, norm, linear, out)
        balanced = self._balanced.tile(len(x), linear)
        if balanced is not None:
            return self._balanced.multiply(_inputs(x, linear, norm), linear, balanced, out=out)
        if isinstance(linear, Fp8Linear):
            product = self._fp8.multiply(quantize(x, linear, norm), linear)
            return product if out is None else out.copy_(product)
        x = rms_norm(x, norm)
        if out is None:
            return linear(x)
        return torch.mm(x, linear.weight.t(), out=out) if linear.bias is None else out.copy_(linear(x))

    def norm_linears(self, x: torch.Tensor, norm: Norm, linears: Sequence[LinearBase]) -> list[torch.Tensor]:
        if self._few_rows.fits_pair(x, linears):
            return self._few_rows.norm_pair(x, norm, linears)
        return super().norm_linears(x, norm, linears)

    def norm_gated(self, x: torch.Tensor, norm: Norm, linear: LinearBase) -> torch.Tensor:
        if self._few_rows.fits(x, linear):
            return self._few_rows.norm_gated(x, norm, linear)
        balanced = self._balanced.tile(len(x), linear, is_gated=True)
        if balanced is not None:
            return self._balanced.multiply(_inputs(x, linear, norm), linear, balanced, is_gated=True)
        tile = self._products.tile(len(x), linear, is_gated=True)
        if tile is not None:
            return self._products.multiply(_inputs(x, linear, norm), linear, tile, is_gated=True)
        tile = self._gated.tile(len(x), linear)
        if tile is not None:
            return self._gated.multiply(rms_norm(x, norm), linear, tile)
        return self.gate(self.norm_linear(x, norm, linear))

    def gate(self, projected: torch.Tensor) -> torch.Tensor:
        return flashinfer.activation.silu_and_mul(projected)

    def normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return rms_norm(x, norm)

    def linear_add(self, x: torch.Tensor, linear: LinearBase, residual: torch.Tensor) -> torch.Tensor:
        if self._few_rows.fits(x, linear):
            return self._few_rows.linear_add(x, linear, residual)
        balanced = self._balanced.tile(len(x), linear)
        if balanced is not None:
            return self._balanced.multiply(_inputs(x, linear), linear, balanced, residual)
        if isinstance(linear, Fp8Linear):
            return self._fp8.multiply(quantize(x, linear), linear, residual)
        tile = self._products.tile(len(x), linear)
        if tile is not None:
            return self._products.multiply(x, linear, tile, residual)
        if linear.bias is not None:
            residual += linear.bias
        # Saves a pass over memory.
        return torch.addmm(residual, x, linear.weight.t(), out=residual)

    def linear(self, x: torch.Tensor, linear: LinearBase) -> torch.Tensor:
        if self._few_rows.fits(x, linear):
            return self._few_rows.linear(x, linear)
        balanced = self._balanced.tile(len(x), linear)
        if balanced is not None:
            return self._balanced.multiply(_inputs(x, linear), linear, balanced)
        if isinstance(linear, Fp8Linear):
            return self._fp8.multiply(quantize(x, linear), linear)
        tile = self._products.tile(len(x), linear)
        return linear(x) if tile is None else self._products.multiply(x, linear, tile)

    def gated_mlp(self, x: torch.Tensor, norm: Norm, gate_up: LinearBase, down: LinearBase) -> torch.Tensor:
        if not isinstance(down, Fp8Linear) or self._gates_at_once(x, gate_up):
            return super().gated_mlp(x, norm, gate_up, down)
        return self._quantized_mlp(x, norm, gate_up, down, x)

    def gated(self, x: torch.Tensor, norm: Norm, gate_up: LinearBase, down: LinearBase) -> torch.Tensor:
        if not isinstance(down, Fp8Linear) or self._gates_at_once(x, gate_up):
            return super().gated(x, norm, gate_up, down)
        return self._quantized_mlp(x, norm, gate_up, down, None)

    def _quantized_mlp(
        self, x: torch.Tensor, norm: Norm, gate_up: LinearBase, down: Fp8Linear, residual: torch.Tensor | None
    ) -> torch.Tensor:
        projected = self.norm_linear(x, norm, gate_up)
        return self._fp8.multiply(quantize(projected, down, is_gated=True), down, residual)

    def _gates_at_once(self, x: torch.Tensor, gate_up: LinearBase) -> bool:
        kernels = self._balanced, self._products
        return self._few_rows.fits(x, gate_up) or any(k.tile(len(x), gate_up, is_gated=True) for k in kernels)

    def mixture(
        self, x: torch.Tensor, norm: Norm, experts: Experts, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        shared = experts.shared
        if shared is None or self._experts.adds_shared(len(x), experts):
            return self._experts.mixture(x, norm, experts, residual)
        hidden = self.norm_gated(x, norm, shared.gate_up)
        if shared.gate is None:
            return self.linear_add(hidden, shared.down, self._experts.mixture(x, norm, experts, residual))
        logits = (rms_norm(x, norm).float() * shared.gate.float()).sum(-1, keepdim=True)  # (num_tokens, 1)
        output = self.linear_add(hidden, shared.down, torch.zeros_like(x))
        return self._experts.mixture(x, norm, experts, residual).addcmul_(logits.sigmoid().to(x.dtype), output)

    def begin_compiling(self, linears: Iterable[LinearBase]) -> None:
        self._balanced.begin_compiling(linears)

    def leaving(self, num_multiprocessors: int) -> "CudaOps":
        if not num_multiprocessors:
            return self
        ops = copy.copy(self)
        ops._balanced = self._balanced.leaving(num_multiprocessors)
        return ops

    def captures(self, experts: Experts) -> bool:
        return self._experts.captures(experts)

    def normalize(self, x: torch.Tensor, norm: Norm) -> None:
        rms_norm(x, norm, out=x)


def _inputs(x: torch.Tensor, linear: LinearBase, norm: Norm | None = None) -> torch.Tensor | Quantized:
    """Returns the contiguous inputs of a product, normalized first if given a norm."""
    if isinstance(linear, Fp8Linear):
        return quantize(x, linear, norm)
    return x.contiguous() if norm is None else rms_norm(x, norm)
