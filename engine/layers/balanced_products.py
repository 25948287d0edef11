"""Products of tens to about a thousand rows, on Hopper's tensor cores (balanced_products.cu). Needs CUDA."""

import copy
from collections.abc import Iterable
from typing import Any

import torch

from tandem.engine.layers.balanced_choice import Matrix, balanced_tile_for, matrix_of, tiles_of
from tandem.engine.layers.balanced_tiles import GROUP_OUTPUTS, BalancedTile, deal, num_stages, result_bytes
from tandem.engine.layers.cuda_kernel import SWIZZLE, CudaKernel, begin_compiling, compile_options, tensor_map
from tandem.engine.layers.fp8 import FP8_DTYPE
from tandem.engine.layers.fp8_linear import Fp8Linear
from tandem.engine.layers.fp8_quantize import Quantized
from tandem.engine.layers.kernel_compilers import Kernel
from tandem.engine.layers.linear import LinearBase
from tandem.engine.layers.product_tiles import Product
from tandem.engine.layers.products import product_of

PACKAGE, SOURCE = "tandem.engine.layers", "balanced_products"
# Instructions of this architecture alone.
CAPABILITY = (9, 0)
# Stages are aligned to swizzle patterns.
ALIGNMENT = 1024
# Rows of gate and of up that take turns in a tile.
GATED_ROWS = 8
# Numbers of a block's largest tile.
MAX_TILE = 128 * 256
# Steps that a block takes at least, if it does not have the device alone.
FINE_UNIT = 4
DTYPES = torch.bfloat16, FP8_DTYPE


class BalancedProducts:
    """The kernel in the variants that a model needs, and its memory, for one stream at a time."""

    def __init__(self, device: torch.device) -> None:
        properties: Any = torch.cuda.get_device_properties(device)
        self._device = device
        self._is_supported = torch.cuda.get_device_capability(device) == CAPABILITY
        self._num_sms = properties.multi_processor_count
        self._num_left = 0
        self._shared_memory = properties.shared_memory_per_block_optin
        # With the number of clusters that run at once.
        self._kernels: dict[tuple[BalancedTile, bool, bool], tuple[CudaKernel, int]] = {}
        self._matrices: set[Matrix] = set()
        self._partials = torch.empty(self._num_sms * MAX_TILE if self._is_supported else 0, device=device)
        # Zero between launches.
        self._arrived = torch.zeros(self._num_sms, dtype=torch.int32, device=device)

    def tile(self, num_tokens: int, linear: LinearBase, *, is_gated: bool = False) -> BalancedTile | None:
        """Returns None if another kernel is faster. The first call for a matrix begins to compile all its kernels."""
        if not self._multiplies(linear):
            return None
        product = product_of(num_tokens, linear, is_gated=is_gated)
        if matrix_of(product) not in self._matrices:
            self._begin([product])
        tile = balanced_tile_for(product)
        if tile is None or tile.parts == 1:
            return tile
        # On some GPUs fewer clusters fit beside each other, and tiles would take turns.
        _, max_clusters = self.kernel(tile, is_gated=is_gated, is_fp8=product.kind != "plain")
        num_clusters = deal(tile, num_tokens, len(linear.weight), SWIZZLE, max_clusters).num_clusters
        return tile if num_clusters <= max_clusters else None

    def begin_compiling(self, linears: Iterable[LinearBase]) -> None:
        """Begins to compile all kernels of some matrices, gated or not: the table has only what models need."""
        supported = [linear for linear in linears if self._multiplies(linear)]
        self._begin([product_of(1, linear, is_gated=is_gated) for linear in supported for is_gated in (False, True)])

    def leaving(self, num_sms: int) -> "BalancedProducts":
        """Returns products of whole tiles that leave multiprocessors to other kernels, with the same memory."""
        products = copy.copy(self)
        products._num_left = num_sms
        return products

    def multiply(
        self,
        x: torch.Tensor | Quantized,
        linear: LinearBase,
        tile: BalancedTile,
        residual: torch.Tensor | None = None,
        *,
        is_gated: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the projections of x, (num_tokens, out_size) bfloat16; adds them to `residual` in place if given.

        A row's bits depend on its inputs and on the number of rows alone.

        Args:
            x: Quantized for FP8 weights with scales per row, otherwise (num_tokens, in_size) bfloat16.
            is_gated: return silu(first half of the projections) * second half, in float32: (num_tokens, out_size / 2).
            out: contiguous.
        """
        numbers, scales, num_tokens = x if isinstance(x, Quantized) else (x, None, len(x))
        weight = linear.weight
        num_rows, in_size = weight.shape
        out_size = num_rows // 2 if is_gated else num_rows
        if residual is not None:
            out = residual
        elif out is None:
            out = torch.empty(num_tokens, out_size, dtype=torch.bfloat16, device=self._device)
        assert numbers.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
        is_fp8 = scales is not None
        kernel, max_clusters = self.kernel(tile, is_gated=is_gated, is_fp8=is_fp8)
        # The parts of a cut tile must all run at once.
        if self._num_left and tile.parts == 1:
            max_clusters = min(max_clusters, (self._num_sms - self._num_left) // tile.cluster)
            # The unit was chosen for all multiprocessors.
            tile = tile._replace(unit=min(tile.unit, FINE_UNIT))
        dealt = deal(tile, num_tokens, num_rows, in_size * numbers.element_size(), max_clusters)
        depth = SWIZZLE // numbers.element_size()
        weights = weight
        box: tuple[int, ...] = (tile.outputs, depth)
        if is_gated:
            weights = weight.view(2, out_size // GATED_ROWS, GATED_ROWS, in_size).transpose(0, 1)
            box = (tile.outputs // (2 * GATED_ROWS), 2, GATED_ROWS, depth)
        kernel.launch(
            (dealt.num_clusters * tile.num_blocks, 1),
            tile.num_threads,
            tensor_map(numbers, (tile.tokens // tile.cluster, depth)),
            tensor_map(weights, box),
            linear.bias,
            scales,
            linear.scale if isinstance(linear, Fp8Linear) else None,
            residual,
            out,
            self._partials,
            self._arrived,
            num_tokens,
            out_size,
            dealt.num_token_tiles,
            dealt.num_tiles,
            dealt.num_cut,
            tile.unit,
            dealt.num_steps,
        )
        return out

    def kernel(self, tile: BalancedTile, *, is_gated: bool, is_fp8: bool) -> tuple[CudaKernel, int]:
        """Returns the kernel, and the clusters of it that run at once."""
        key = tile._replace(unit=0), is_gated, is_fp8
        if key not in self._kernels:
            stages = num_stages(tile, self._shared_memory, is_gated=is_gated)
            results = result_bytes(tile, is_gated=is_gated)
            kernel = CudaKernel(
                PACKAGE,
                SOURCE,
                _macros(tile, stages, is_gated=is_gated, is_fp8=is_fp8),
                self._device,
                shared_bytes=stages * (tile.outputs + tile.tokens) * SWIZZLE + results + ALIGNMENT,
                is_specific=True,
                cluster=tile.num_blocks,
            )
            # Some clusters' blocks do not fit beside each other.
            max_clusters = self._num_sms
            if tile.num_blocks > 1:
                max_clusters = kernel.max_clusters(tile.num_threads)
            self._kernels[key] = kernel, max_clusters
        return self._kernels[key]

    def _multiplies(self, linear: LinearBase) -> bool:
        return self._is_supported and linear.weight.dtype in DTYPES

    def _begin(self, products: Iterable[Product]) -> None:
        """Begins to compile all kernels of matrices that were not begun before, by a product of each."""
        kernels: list[Kernel] = []
        for product in products:
            matrix = matrix_of(product)
            if matrix not in self._matrices:
                self._matrices.add(matrix)
                is_gated, is_fp8 = product.is_gated, product.kind != "plain"
                kernels += (self._compiled(tile, is_gated=is_gated, is_fp8=is_fp8) for tile in tiles_of(matrix))
        begin_compiling(kernels)

    def _compiled(self, tile: BalancedTile, *, is_gated: bool, is_fp8: bool) -> Kernel:
        return PACKAGE, SOURCE, compile_options_of(tile, self._shared_memory, is_gated=is_gated, is_fp8=is_fp8)


def compile_options_of(tile: BalancedTile, shared_memory: int, *, is_gated: bool, is_fp8: bool) -> tuple[str, ...]:
    """Returns the options with which to compile SOURCE ahead. Args: shared_memory: bytes of a block."""
    stages = num_stages(tile, shared_memory, is_gated=is_gated)
    macros = _macros(tile, stages, is_gated=is_gated, is_fp8=is_fp8)
    return compile_options(macros, CAPABILITY, is_specific=True)


def _macros(tile: BalancedTile, stages: int, *, is_gated: bool, is_fp8: bool) -> dict[str, int]:
    """Returns the macros of balanced_products.cu."""
    columns = tile.tokens // 2 if tile.outputs == GROUP_OUTPUTS else tile.tokens
    return {
        "FP8": int(is_fp8),
        "GATED": int(is_gated),
        "OUTPUTS": tile.outputs,
        "TOKENS": tile.tokens,
        "CLUSTER": tile.cluster,
        "STAGES": stages,
        "PARTS": tile.parts,
        "BLOCKS": columns // 16,
        "COLUMNS": columns,
        "OPERAND_A": columns // 2,
        "OPERAND_B": columns // 2 + 1,
        "OPERAND_ADDS": columns // 2 + 2,
    }
