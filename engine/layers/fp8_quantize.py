"""Quantization of FP8 inputs, fused with the operation before. Needs CUDA."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.engine.layers.cuda_kernel import has_dependent_launch
from tandem.engine.layers.fp8 import FP8_DTYPE
from tandem.engine.layers.fp8 import FP8_MAX as _FP8_MAX
from tandem.engine.layers.fp8 import SMALLEST_AMAX as _SMALLEST_AMAX
from tandem.engine.layers.fp8_linear import Fp8Linear
from tandem.engine.layers.norm import Norm
from tandem.engine.models.quantization import BLOCK as _BLOCK
from tandem.engine.models.quantization import InputScales

FP8_MAX = tl.constexpr(_FP8_MAX)
SMALLEST_AMAX = tl.constexpr(_SMALLEST_AMAX)
GROUP = tl.constexpr(_BLOCK)
# cuBLAS requires this for group scales.
ROW_MULTIPLE = 4
_NUM_OF_WARP = 1024
_MIN_WARPS, _MAX_WARPS = 4, 32


class Quantized(NamedTuple):
    """
    Attributes:
        numbers: (num_rows, in_size) float8_e4m3fn; rows beyond num_tokens are arbitrary padding.
        scales: float32, (num_rows, 1); for groups (num_rows, in_size / BLOCK), column-major.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    num_tokens: int

    def rows(self, part: slice) -> "Quantized":
        return Quantized(self.numbers[part], self.scales[part], part.stop - part.start)


def quantize(x: torch.Tensor, linear: Fp8Linear, norm: Norm | None = None, *, is_gated: bool = False) -> Quantized:
    """Quantizes the input of `linear`, rounding once.

    Args:
        x: (num_tokens, in_size); if gated (num_tokens, 2 * in_size).
        norm: applied to x first, in float32.
        is_gated: quantize silu(first half of x) * second half.
    """
    assert x.shape[1] == (2 if is_gated else 1) * linear.weight.shape[1]
    return quantize_rows(x, linear.inputs, linear.input_scale, norm, is_gated=is_gated)


def quantize_rows(
    x: torch.Tensor,
    inputs: InputScales,
    input_scale: torch.Tensor | None = None,
    norm: Norm | None = None,
    *,
    is_gated: bool = False,
) -> Quantized:
    """Quantizes the input of any product; see quantize(). Args: input_scale: (1,) float32 for "static" inputs."""
    return _launch(x.contiguous(), inputs, input_scale, norm, None, is_gated=is_gated)


def normalize_and_quantize(
    x: torch.Tensor, norm: Norm, inputs: InputScales, input_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, Quantized]:
    """Normalizes (num_tokens, size), rounds to x's dtype, and also returns the rounded rows quantized."""
    assert x.is_contiguous()
    normed = torch.empty_like(x)
    return normed, _launch(x, inputs, input_scale, norm, normed)


def empty_quantized(num_tokens: int, size: int, inputs: InputScales, device: torch.device) -> Quantized:
    num_rows, num_scales = num_tokens, 1
    if inputs == "group":
        num_rows, num_scales = triton.cdiv(num_tokens, ROW_MULTIPLE) * ROW_MULTIPLE, size // _BLOCK
    numbers = torch.empty(num_rows, size, dtype=FP8_DTYPE, device=device)
    return Quantized(numbers, torch.empty(num_scales, num_rows, device=device).t(), num_tokens)


def _launch(
    x: torch.Tensor,
    inputs: InputScales,
    input_scale: torch.Tensor | None,
    norm: Norm | None,
    normed: torch.Tensor | None,
    *,
    is_gated: bool = False,
) -> Quantized:
    num_tokens, size = len(x), x.shape[1] // (2 if is_gated else 1)
    numbers, scales, _ = quantized = empty_quantized(num_tokens, size, inputs, x.device)
    block = triton.next_power_of_2(size)
    is_dependent = has_dependent_launch(x.device)
    launch: Any = _quantize[(num_tokens,)]
    launch(
        x,
        norm.weight if norm else x,
        input_scale if input_scale is not None else scales,
        normed if normed is not None else x,
        numbers,
        scales,
        norm.eps if norm else 0.0,
        len(numbers),
        SIZE=size,
        BLOCK=block,
        NORM=norm is not None,
        KEEPS_NORMED=normed is not None,
        GATED=is_gated,
        INPUTS=inputs,
        DEPENDENT=is_dependent,
        num_warps=min(_MAX_WARPS, max(_MIN_WARPS, block // _NUM_OF_WARP)),
        launch_pdl=is_dependent,
    )
    return quantized


# Do not recompile for each number of tokens.
@triton.jit(do_not_specialize=["num_rows"])
def _quantize(  # type: ignore[no-untyped-def]
    x,
    norm_weight,
    input_scale,
    normed,
    numbers,
    scales,
    eps,
    num_rows,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    KEEPS_NORMED: tl.constexpr,
    GATED: tl.constexpr,
    INPUTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    exists = i < SIZE
    if NORM:
        w = tl.load(norm_weight + i, mask=exists, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if GATED:
        gate = tl.load(x + token * 2 * SIZE + i, mask=exists, other=0.0).to(tl.float32)
        a = tl.load(x + token * 2 * SIZE + SIZE + i, mask=exists, other=0.0).to(tl.float32)
        a = gate / (1 + tl.exp(-gate)) * a
    else:
        a = tl.load(x + token * SIZE + i, mask=exists, other=0.0).to(tl.float32)
    if NORM:
        a = a * tl.rsqrt(tl.sum(a * a) / SIZE + eps) * w
    if KEEPS_NORMED:
        rounded = a.to(normed.dtype.element_ty)
        tl.store(normed + token * SIZE + i, rounded, mask=exists)
        a = rounded.to(tl.float32)
    if INPUTS == "group":
        groups = tl.reshape(a, (BLOCK // GROUP, GROUP))
        scale = tl.maximum(tl.max(tl.abs(groups), 1), SMALLEST_AMAX) / FP8_MAX
        g = tl.arange(0, BLOCK // GROUP)
        tl.store(scales + g * num_rows + token, scale, mask=g * GROUP < SIZE)
        a = tl.reshape(groups / scale[:, None], (BLOCK,))
    else:
        if INPUTS == "static":
            scale = tl.load(input_scale)
        else:
            scale = tl.maximum(tl.max(tl.abs(a)), SMALLEST_AMAX) / FP8_MAX
        tl.store(scales + token, scale)
        a = a / scale
    a = tl.minimum(tl.maximum(a, -FP8_MAX), FP8_MAX)
    tl.store(numbers + token * SIZE + i, a.to(numbers.dtype.element_ty), mask=exists)
