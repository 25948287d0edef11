"""The same computations in fewer kernels. Imported on CUDA machines alone."""

import flashinfer
import torch
import triton
import triton.language as tl

from engine.layers.few_rows import FewRows
from engine.layers.linear import Linear
from engine.layers.norm import Norm
from engine.layers.ops import LayerOps


class CudaOps(LayerOps):
    """Few tokens go through a kernel of our own; for many the libraries' matrix products are as fast as there are."""

    def __init__(self, device: torch.device) -> None:
        self._few_rows = FewRows(device)

    def norm_linear(self, x: torch.Tensor, norm: Norm, linear: Linear, out: torch.Tensor | None = None) -> torch.Tensor:
        if self._few_rows.fits(x, linear):
            return self._few_rows.norm_linear(x, norm, linear, out)
        x = rms_norm(x, norm)
        if out is None:
            return linear(x)
        return torch.mm(x, linear.weight.t(), out=out) if linear.bias is None else out.copy_(linear(x))

    def norm_gated(self, x: torch.Tensor, norm: Norm, linear: Linear) -> torch.Tensor:
        if self._few_rows.fits(x, linear):
            return self._few_rows.norm_gated(x, norm, linear)
        return flashinfer.activation.silu_and_mul(linear(rms_norm(x, norm)))

    def linear_add(self, x: torch.Tensor, linear: Linear, residual: torch.Tensor) -> torch.Tensor:
        if self._few_rows.fits(x, linear):
            return self._few_rows.linear_add(x, linear, residual)
        if linear.bias is not None:
            residual += linear.bias
        # The product is added where it is made, which saves a pass over memory.
        return torch.addmm(residual, x, linear.weight.t(), out=residual)


def rms_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """(num_tokens, size), contiguous, to the same; float32 in between, rounded once."""
    assert x.is_contiguous()
    num_tokens, size = x.shape
    out = torch.empty_like(x)
    _rms_norm[(num_tokens,)](x, norm.weight, out, norm.eps, SIZE=size, BLOCK=triton.next_power_of_2(size), num_warps=4)
    return out


@triton.jit
def _rms_norm(x, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * SIZE
    i = tl.arange(0, BLOCK)
    exists = i < SIZE
    a = tl.load(x + row + i, mask=exists, other=0.0).to(tl.float32)
    w = tl.load(weight + i, mask=exists, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(a * a) / SIZE + eps)
    tl.store(out + row + i, (a * scale * w).to(out.dtype.element_ty), mask=exists)
