"""Matrix products of few tokens, fused with their neighbors (few_rows.cu, few_rows_ring.cu). Needs CUDA."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tandem.engine.layers.cuda_kernel import CudaKernel, has_dependent_launch
from tandem.engine.layers.few_rows_ring import FewRowsRing
from tandem.engine.layers.fp8_linear import Fp8Linear
from tandem.engine.layers.linear import LinearBase
from tandem.engine.layers.norm import Norm

# Library kernels are as fast for more tokens.
MAX_TOKENS = 16
# For matrices of at least WIDE_TILES tiles of 16 outputs.
MAX_TOKENS_WIDE = 8
WIDE_TILES = 4096
# For FP8 matrices of at least LARGE_FP8 numbers without block scales: products.py takes more tokens.
MAX_TOKENS_LARGE_FP8 = 8
LARGE_FP8 = 2**23
STEP = 32
FP8_STEP = 64


class Tuning(NamedTuple):
    """Macros of few_rows.cu. `held`: at most one block per multiprocessor takes a share of the tiles, and the matrix
    has warps * held stretches of inputs."""

    row_tiles: int
    warps: int
    depth: int
    prefetch: int
    blocks: int = 0
    held: int = 0


class FewRows:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._has_kernel = has_dependent_launch(device)
        self._ring = FewRowsRing(device)
        self._kernels: dict[tuple[Tuning, int, bool, bool, bool, int], CudaKernel] = {}

    def fits(self, x: torch.Tensor, linear: LinearBase) -> bool:
        num_out, num_in = linear.weight.shape
        max_tokens = MAX_TOKENS_WIDE if num_out // 16 >= WIDE_TILES else MAX_TOKENS
        step = STEP
        if isinstance(linear, Fp8Linear):
            step = FP8_STEP
            if not linear.is_block and linear.weight.numel() >= LARGE_FP8:
                max_tokens = min(max_tokens, MAX_TOKENS_LARGE_FP8)
        return self._has_kernel and x.dtype is torch.bfloat16 and 0 < len(x) <= max_tokens and num_in % step == 0

    def fits_pair(self, x: torch.Tensor, linears: Sequence[LinearBase]) -> bool:
        """Returns whether one kernel multiplies both matrices."""
        return (
            len(linears) == 2
            and all(self.fits(x, linear) and linear.bias is None for linear in linears)
            and self._ring.plan(len(x), linears) is not None
        )

    def norm_pair(self, x: torch.Tensor, norm: Norm, linears: Sequence[LinearBase]) -> list[torch.Tensor]:
        """Returns the projections of rms_norm(x) by two matrices that fit."""
        outs = [x.new_empty(len(x), len(linear.weight)) for linear in linears]
        ring = self._ring.plan(len(x), linears)
        assert ring is not None and x.is_contiguous()
        self._ring.launch(ring, x, linears, outs, norm, add=False)
        return outs

    def norm_linear(self, x: torch.Tensor, norm: Norm, linear: LinearBase, out: torch.Tensor | None) -> torch.Tensor:
        if out is None:
            out = x.new_empty(len(x), len(linear.weight))
        self._launch(x, linear, out, norm=norm)
        return out

    def norm_gated(self, x: torch.Tensor, norm: Norm, linear: LinearBase) -> torch.Tensor:
        out = x.new_empty(len(x), len(linear.weight) // 2)
        self._launch(x, linear, out, norm=norm, gated=True)
        return out

    def linear(self, x: torch.Tensor, linear: LinearBase) -> torch.Tensor:
        out = x.new_empty(len(x), len(linear.weight))
        self._launch(x, linear, out)
        return out

    def linear_add(self, x: torch.Tensor, linear: LinearBase, residual: torch.Tensor) -> torch.Tensor:
        self._launch(x, linear, residual, add=True)
        return residual

    def _launch(
        self,
        x: torch.Tensor,
        linear: LinearBase,
        out: torch.Tensor,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        add: bool = False,
    ) -> None:
        assert x.is_contiguous() and out.is_contiguous() and linear.weight.is_contiguous()
        ring = None if gated else self._ring.plan(len(x), [linear])
        if ring is not None:
            self._ring.launch(ring, x, [linear], [out], norm, add)
            return
        num_tokens, num_in = x.shape
        num_out = out.shape[1]
        num_tiles = -(-num_out // (8 if gated else 16))
        if isinstance(linear, Fp8Linear):
            scale, fp8 = linear.scale, 2 if linear.is_block else 1
            tuning = self.fp8_tuning(num_tiles, num_in, num_tokens, is_block=linear.is_block)
        else:
            scale, fp8 = None, 0
            tuning = self.tuning(num_tiles, num_in, num_tokens)
        key = tuning, -(-num_tokens // 8), norm is not None, gated, add, fp8
        kernel = self._kernels.get(key)
        if kernel is None:
            names = "TOKEN_TILES", "NORM", "GATED", "ADD", "FP8"
            macros = {name.upper(): value for name, value in tuning._asdict().items()}
            macros.update(zip(names, map(int, key[1:]), strict=True))
            kernel = self._kernels[key] = CudaKernel(__package__, "few_rows", macros, self._device)
        num_blocks = -(-num_tiles // tuning.row_tiles)
        if tuning.held:
            num_blocks = -(-num_blocks // -(-num_blocks // self._num_sms))
        kernel.launch(
            (num_blocks, 1),
            tuning.warps * 32,
            linear.weight,
            scale,
            x,
            norm.weight if norm else None,
            linear.bias,
            out,
            num_tokens,
            num_out,
            num_in,
            norm.eps if norm else 0.0,
        )

    def tuning(self, num_tiles: int, num_in: int, num_tokens: int) -> Tuning:
        """Measured on an H200 with the matrices of 0.6B to 8B models. Fastest is one wave of blocks that reads the
        tokens once per block."""
        if num_tiles <= self._num_sms:
            return Tuning(row_tiles=1, warps=16, depth=4, prefetch=2048)
        if num_tiles <= 2 * self._num_sms:
            return Tuning(row_tiles=2, warps=16, depth=2, prefetch=0)
        if num_tiles >= 32 * self._num_sms or (num_tokens > 8 and num_tiles >= 8 * self._num_sms):
            return Tuning(row_tiles=4, warps=8, depth=1, prefetch=0)
        if num_tokens > 8:
            return Tuning(row_tiles=2, warps=8, depth=2, prefetch=0)
        if num_in == 8 * 16 * STEP:
            return Tuning(row_tiles=1, warps=16, depth=4, prefetch=0, held=8)
        return Tuning(row_tiles=2, warps=16, depth=1, prefetch=0)

    def fp8_tuning(self, num_tiles: int, num_in: int, num_tokens: int, *, is_block: bool) -> Tuning:
        """Measured on an H200 with the matrices of an 8B model, and of Qwen3-30B-A3B.

        A thread has twice as many inputs per byte of weights, so registers hold fewer stretches.
        """
        if num_tiles <= self._num_sms:
            if num_tokens <= 8 and num_in == 4 * 16 * FP8_STEP:
                return Tuning(row_tiles=1, warps=16, depth=4, prefetch=0)
            return Tuning(row_tiles=1, warps=16, depth=2, prefetch=4096, blocks=2 if num_tokens <= 8 else 0)
        if num_tiles <= 2 * self._num_sms:
            if num_tokens > 8:
                return Tuning(row_tiles=1, warps=16, depth=1, prefetch=2048)
            return Tuning(row_tiles=1, warps=16, depth=2, prefetch=2048, blocks=2)
        if num_tokens > 8:
            return Tuning(row_tiles=2, warps=8, depth=1, prefetch=0)
        if num_in == 4 * 16 * FP8_STEP and num_tiles < 8 * self._num_sms:
            return Tuning(row_tiles=1, warps=16, depth=4, prefetch=0, held=4)
        if num_in == 4 * 16 * FP8_STEP:
            return Tuning(row_tiles=2, warps=16, depth=2, prefetch=0, held=4)
        if num_tiles <= 3 * self._num_sms and num_in == 2 * 16 * FP8_STEP:
            return Tuning(row_tiles=3, warps=16, depth=2, prefetch=0)
        if num_tiles <= 4 * self._num_sms:
            return Tuning(row_tiles=4, warps=16, depth=1, prefetch=0)
        return Tuning(row_tiles=2, warps=8, depth=1, prefetch=0, blocks=0 if is_block else 4)
