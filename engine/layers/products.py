"""Matrix products of a moderate number of tokens, by a Triton kernel. Needs CUDA."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.engine.layers.cuda_kernel import has_dependent_launch
from tandem.engine.layers.fp8_linear import Fp8Linear
from tandem.engine.layers.fp8_quantize import Quantized
from tandem.engine.layers.linear import LinearBase
from tandem.engine.layers.product_tiles import MAX_SPLIT_TILE, Device, Kind, Product, Tile, tile_for
from tandem.engine.models.quantization import BLOCK as _BLOCK

GROUP = tl.constexpr(_BLOCK)
# Bytes per weight row to prefetch before the wait for inputs, and per cache line.
PREFETCH = tl.constexpr(512)
LINE = tl.constexpr(128)


class Products:
    """The kernel and its memory for split tiles, for one stream at a time.

    From Hopper on it requests weights while earlier kernels run (programmatic dependent launch).
    """

    def __init__(self, device: torch.device) -> None:
        properties: Any = torch.cuda.get_device_properties(device)
        self.device = Device(properties.multi_processor_count, properties.shared_memory_per_block_optin)
        self._is_dependent = has_dependent_launch(device)
        self._partials = torch.empty(self.device.num_multiprocessors * MAX_SPLIT_TILE, device=device)
        # Finished blocks per tile; zero between launches.
        self._arrived = torch.zeros(self.device.num_multiprocessors, dtype=torch.int32, device=device)

    def tile(self, num_tokens: int, linear: LinearBase, *, is_gated: bool = False) -> Tile | None:
        if not isinstance(linear, Fp8Linear) and not (self._is_dependent and linear.weight.dtype is torch.bfloat16):
            return None
        return tile_for(product_of(num_tokens, linear, is_gated=is_gated), self.device)

    def multiply(
        self,
        x: torch.Tensor | Quantized,
        linear: LinearBase,
        tile: Tile,
        residual: torch.Tensor | None = None,
        *,
        is_gated: bool = False,
    ) -> torch.Tensor:
        """Returns the projections of x, (num_tokens, out_size) bfloat16; adds them to `residual` in place if given.

        Args:
            x: Quantized for FP8 weights, otherwise (num_tokens, in_size) bfloat16.
            is_gated: return silu(first half of the projections) * second half, in float32: (num_tokens, out_size / 2).
                Not for block scales.
        """
        numbers, scales, num_tokens = x if isinstance(x, Quantized) else (x, x, len(x))
        assert numbers.is_contiguous() and (residual is None or residual.is_contiguous())
        product = product_of(num_tokens, linear, is_gated=is_gated)
        out = residual
        if out is None:
            out = torch.empty(num_tokens, product.out_size, dtype=torch.bfloat16, device=numbers.device)
        grid = (triton.cdiv(num_tokens, tile.tokens), product.out_size // tile.outputs, tile.num_splits)
        if tile.num_splits > 1:
            num_tiles = grid[0] * grid[1]
            assert num_tiles <= self._arrived.numel()
            assert num_tiles * tile.num_splits * tile.tokens * tile.outputs <= self._partials.numel()
        assert product.kind != "block" or (tile.num_splits == 1 and tile.depth == _BLOCK and not is_gated)
        launch: Any = _multiply[grid]
        launch(
            numbers,
            scales,
            linear.weight,
            linear.scale if isinstance(linear, Fp8Linear) else scales,
            linear.bias if linear.bias is not None else out,
            out,
            self._partials,
            self._arrived,
            num_tokens,
            len(numbers),
            product.out_size,
            product.in_size,
            product.in_size // (tile.depth * tile.num_splits),
            tile.num_splits,
            TOKENS=tile.tokens,
            OUTPUTS=tile.outputs,
            DEPTH=tile.depth,
            KIND=product.kind,
            IS_SPLIT=tile.num_splits > 1,
            GATED=is_gated,
            HAS_BIAS=linear.bias is not None,
            ADDS=residual is not None,
            DEPENDENT=self._is_dependent,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            launch_pdl=self._is_dependent,
        )
        return out


def product_of(num_tokens: int, linear: LinearBase, *, is_gated: bool = False) -> Product:
    kind: Kind = "plain"
    if isinstance(linear, Fp8Linear):
        kind = "block" if linear.is_block else "channel"
    num_rows, in_size = linear.weight.shape
    return Product(kind, num_tokens, num_rows // 2 if is_gated else num_rows, in_size, is_gated)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_steps", "num_splits"])
def _multiply(  # type: ignore[no-untyped-def]
    x,
    x_scales,
    weight,
    weight_scales,
    bias,
    out,
    partials,
    arrived,
    num_tokens,
    num_rows,
    out_size,
    in_size,
    num_steps,
    num_splits,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A token's scales are num_rows apart, and a tile of outputs lies in one block of weights."""
    token_tile, output_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, j, k = tl.arange(0, TOKENS), tl.arange(0, OUTPUTS), tl.arange(0, DEPTH)
    tokens = token_tile * TOKENS + i
    first_output = output_tile * OUTPUTS
    outputs = first_output + j
    has_token = tokens < num_tokens
    first = split * num_steps * DEPTH
    if DEPENDENT:
        gdc_launch_dependents()
        num_bytes = num_steps * DEPTH * (2 if KIND == "plain" else 1)
        _prefetch(weight, outputs, first, in_size, num_bytes, KIND)
        if GATED:
            _prefetch(weight, out_size + outputs, first, in_size, num_bytes, KIND)
        gdc_wait()
    x_rows = x + tokens[:, None].to(tl.int64) * in_size + (first + k)[None, :]
    columns = weight + outputs[None, :].to(tl.int64) * in_size + (first + k)[:, None]
    of_block = weight_scales + first_output // GROUP * num_steps
    up_columns = columns + out_size.to(tl.int64) * in_size
    sums = tl.zeros((TOKENS, OUTPUTS), dtype=tl.float32)
    ups = tl.zeros((TOKENS, OUTPUTS), dtype=tl.float32)
    for step in range(num_steps):
        a = tl.load(x_rows + step * DEPTH, mask=has_token[:, None], other=0.0)
        b = tl.load(columns + step * DEPTH)
        if KIND == "block":
            a_scale = tl.load(x_scales + step * num_rows + tokens, mask=has_token, other=0.0)
            b_scale = tl.load(of_block + step)
            sums += tl.dot(a, b) * (a_scale * b_scale)[:, None]
        else:
            sums = tl.dot(a, b, sums)
        if GATED:
            ups = tl.dot(a, tl.load(up_columns + step * DEPTH), ups)
    if IS_SPLIT:
        tile = token_tile * tl.num_programs(1) + output_tile
        parts = partials + tile.to(tl.int64) * num_splits * TOKENS * OUTPUTS + i[:, None] * OUTPUTS + j[None, :]
        tl.store(parts + split * TOKENS * OUTPUTS, sums, mask=has_token[:, None])
        tl.debug_barrier()
        # Makes the other blocks' partial sums visible.
        num_before = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu")
        if num_before == num_splits - 1:
            # In a fixed order: the same inputs give the same bits.
            total = tl.zeros((TOKENS, OUTPUTS), dtype=tl.float32)
            for s in range(num_splits):
                part = parts + s * TOKENS * OUTPUTS
                total += tl.load(part, mask=has_token[:, None], other=0.0, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
            total = _projected(total, x_scales, weight_scales, bias, tokens, has_token, outputs, KIND, HAS_BIAS)
            _write(total, out, tokens, has_token, outputs, out_size, ADDS)
    else:
        sums = _projected(sums, x_scales, weight_scales, bias, tokens, has_token, outputs, KIND, HAS_BIAS)
        if GATED:
            up_rows = out_size + outputs
            ups = _projected(ups, x_scales, weight_scales, bias, tokens, has_token, up_rows, KIND, HAS_BIAS)
            sums = sums / (1 + tl.exp(-sums)) * ups
        _write(sums, out, tokens, has_token, outputs, out_size, ADDS)


@triton.jit
def _prefetch(weight, rows, first, in_size, num_bytes, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    bytes_per_number: tl.constexpr = 2 if KIND == "plain" else 1
    lines = tl.minimum(tl.arange(0, PREFETCH // LINE) * LINE, num_bytes - LINE)
    begin = weight.to(tl.int64) + (rows[:, None].to(tl.int64) * in_size + first) * bytes_per_number
    ahead = begin + lines[None, :]
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [ahead], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _projected(  # type: ignore[no-untyped-def]
    sums, x_scales, weight_scales, bias, tokens, has_token, rows, KIND: tl.constexpr, HAS_BIAS: tl.constexpr
):
    if KIND == "channel":
        sums *= tl.load(x_scales + tokens, mask=has_token, other=0.0)[:, None]
        sums *= tl.load(weight_scales + rows)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + rows)[None, :].to(tl.float32)
    return sums


@triton.jit
def _write(sums, out, tokens, has_token, outputs, out_size, ADDS: tl.constexpr):  # type: ignore[no-untyped-def]
    places = out + tokens[:, None].to(tl.int64) * out_size + outputs[None, :]
    if ADDS:
        sums += tl.load(places, mask=has_token[:, None], other=0.0).to(tl.float32)
    tl.store(places, sums.to(out.dtype.element_ty), mask=has_token[:, None])
