"""Matrix products of FP8 numbers. Imported on CUDA machines alone."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from engine.layers.fp8_linear import LIBRARY_BLOCKS_MULTIPLE, Fp8Linear, library_has_blocks
from engine.layers.fp8_quantize import Quantized
from engine.models.quantization import BLOCK as _BLOCK

GROUP = tl.constexpr(_BLOCK)
# Up to so many tokens our own kernel is chosen: for matrices of which a wave of blocks makes many outputs, and of few.
# cuBLAS takes the same time for few tokens as for many.
MAX_OWN_TOKENS = 64
MAX_OWN_TOKENS_NARROW = 256
NARROW_OUTPUTS_PER_SM = 64


class Tile(NamedTuple):
    """What one block of our own kernel computes, and how. Attributes: outputs: at most BLOCK, which it divides."""

    tokens: int
    outputs: int
    num_warps: int
    num_stages: int


class Fp8Products:
    """Products by the kernel that measures best for their size."""

    def __init__(self, device: torch.device) -> None:
        assert torch.version.cuda is not None
        self._library_has_blocks = library_has_blocks(torch.cuda.get_device_capability(device), torch.version.cuda)
        self._properties = torch.cuda.get_device_properties(device)

    def multiply(self, x: Quantized, linear: Fp8Linear, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The projections of x, (num_tokens, out_size) bfloat16; with a residual added to it, in its memory."""
        if self._is_own(x, linear):
            tile = tile_for(x.num_tokens, len(linear.weight), self._properties)
            return multiply_by_own(x, linear, tile, residual)
        product = multiply_by_library(x, linear)
        return product if residual is None else residual.add_(product)

    def _is_own(self, x: Quantized, linear: Fp8Linear) -> bool:
        if linear.is_block and not (self._library_has_blocks and linear.scale.shape[1] % LIBRARY_BLOCKS_MULTIPLE == 0):
            return True
        is_narrow = len(linear.weight) <= NARROW_OUTPUTS_PER_SM * self._properties.multi_processor_count
        return x.num_tokens <= (MAX_OWN_TOKENS_NARROW if is_narrow else MAX_OWN_TOKENS) and fits_own(linear)


def fits_own(linear: Fp8Linear) -> bool:
    """Whether our own kernel is made for such sizes."""
    out_size, in_size = linear.weight.shape
    return out_size % _BLOCK == 0 and in_size % _BLOCK == 0


def tile_for(num_tokens: int, out_size: int, device: Any) -> Tile:
    """The largest tiles of which there are about as many as multiprocessors.

    Measured on an H200 over the matrices of an 8B model. Fewer than 64 rows of tokens are multiplied by an instruction
    that is slower, whatever rows are empty.

    Args:
        device: its properties, as torch tells them.
    """
    tokens = 64 if num_tokens <= 64 else 128
    num_rows, num_sms = triton.cdiv(num_tokens, tokens), device.multi_processor_count
    outputs = _BLOCK
    while outputs > 32 and num_rows * (out_size // outputs) < num_sms * 2 // 3:
        outputs //= 2
    # Where each multiprocessor has one block it may ask for more ahead.
    num_stages = 6 if num_rows * (out_size // outputs) <= num_sms else 4
    num_fitting = device.shared_memory_per_block_optin // ((tokens + outputs) * _BLOCK)
    return Tile(tokens, outputs, num_warps=8 if tokens == _BLOCK else 4, num_stages=min(num_stages, num_fitting))


def multiply_by_library(x: Quantized, linear: Fp8Linear) -> torch.Tensor:
    """By cuBLAS, or by CUTLASS where cuBLAS has no scales of rows."""
    product = torch._scaled_mm(
        x.numbers,
        linear.weight.t(),
        scale_a=x.scales,
        scale_b=linear.scale.t(),
        bias=None if linear.is_block else linear.bias,
        out_dtype=torch.bfloat16,
        # Of blocks each has sums of its own, which are added in float32. Of few tokens weights take longer to read than
        # products to be added up with all bits.
        use_fast_accum=not linear.is_block and x.num_tokens > MAX_OWN_TOKENS,
    )
    if linear.is_block and linear.bias is not None:
        product += linear.bias
    return product[: x.num_tokens]


def multiply_by_own(x: Quantized, linear: Fp8Linear, tile: Tile, residual: torch.Tensor | None = None) -> torch.Tensor:
    """By a kernel of our own; `residual` is not to be used again."""
    num_tokens, (out_size, in_size) = x.num_tokens, linear.weight.shape
    out = x.numbers.new_empty(num_tokens, out_size, dtype=torch.bfloat16) if residual is None else residual
    launch: Any = _multiply[(triton.cdiv(num_tokens, tile.tokens), out_size // tile.outputs)]
    launch(
        x.numbers,
        x.scales,
        linear.weight,
        linear.scale,
        linear.bias if linear.bias is not None else out,
        out,
        num_tokens,
        len(x.numbers),
        out_size,
        in_size,
        TOKENS=tile.tokens,
        OUTPUTS=tile.outputs,
        IS_BLOCK=linear.is_block,
        HAS_BIAS=linear.bias is not None,
        ADDS=residual is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


# What is compiled must not depend on how many tokens there are: they change from forward to forward.
@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _multiply(  # type: ignore[no-untyped-def]
    x,
    x_scales,
    weight,
    weight_scales,
    bias,
    out,
    num_tokens,
    num_rows,
    out_size,
    in_size,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    IS_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Of blocks, a token's scales are num_rows apart, and a tile of outputs is within one block of weights."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    first_output = tl.program_id(1) * OUTPUTS
    outputs = first_output + tl.arange(0, OUTPUTS)
    k = tl.arange(0, GROUP)
    num_groups = in_size // GROUP
    has_token = tokens < num_tokens
    x_rows = x + tokens[:, None].to(tl.int64) * in_size + k[None, :]
    weight_columns = weight + outputs[None, :].to(tl.int64) * in_size + k[:, None]
    of_block = weight_scales + first_output // GROUP * num_groups
    sums = tl.zeros((TOKENS, OUTPUTS), dtype=tl.float32)
    for group in range(num_groups):
        a = tl.load(x_rows + group * GROUP, mask=has_token[:, None], other=0.0)
        b = tl.load(weight_columns + group * GROUP)
        if IS_BLOCK:
            a_scale = tl.load(x_scales + group * num_rows + tokens, mask=has_token, other=0.0)
            b_scale = tl.load(of_block + group)
            sums += tl.dot(a, b) * (a_scale * b_scale)[:, None]
        else:
            sums = tl.dot(a, b, sums)
    if not IS_BLOCK:
        sums *= tl.load(x_scales + tokens, mask=has_token, other=0.0)[:, None]
        sums *= tl.load(weight_scales + outputs)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + outputs)[None, :].to(tl.float32)
    places = out + tokens[:, None].to(tl.int64) * out_size + outputs[None, :]
    if ADDS:
        sums += tl.load(places, mask=has_token[:, None], other=0.0).to(tl.float32)
    tl.store(places, sums.to(out.dtype.element_ty), mask=has_token[:, None])
