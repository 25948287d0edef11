"""RMS normalization by a fused kernel. Needs CUDA."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.engine.layers.cuda_kernel import has_dependent_launch
from tandem.engine.layers.norm import Norm


def rms_norm(x: torch.Tensor, norm: Norm, out: torch.Tensor | None = None) -> torch.Tensor:
    """Normalizes (num_tokens, size), whose rows may be apart, in float32 and rounds once.

    Args:
        out: may be x.
    """
    num_tokens, size = x.shape
    if out is None:
        out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    assert x.stride(1) == out.stride(1) == 1
    is_dependent = has_dependent_launch(x.device)
    launch: Any = _rms_norm[(num_tokens,)]
    launch(
        x,
        norm.weight,
        out,
        norm.eps,
        x.stride(0),
        out.stride(0),
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        DEPENDENT=is_dependent,
        num_warps=4,
        launch_pdl=is_dependent,
    )
    return out


@triton.jit
def _rms_norm(  # type: ignore[no-untyped-def]
    x, weight, out, eps, x_stride, out_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    exists = i < SIZE
    w = tl.load(weight + i, mask=exists, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    a = tl.load(x + row * x_stride + i, mask=exists, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(a * a) / SIZE + eps)
    tl.store(out + row * out_stride + i, (a * scale * w).to(out.dtype.element_ty), mask=exists)
