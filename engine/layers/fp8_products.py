"""Matrix products of FP8 numbers. Imported on CUDA machines alone."""

import torch

from tandem.engine.layers.fp8_linear import LIBRARY_BLOCKS_MULTIPLE, Fp8Linear, library_has_blocks
from tandem.engine.layers.fp8_quantize import Quantized
from tandem.engine.layers.product_tiles import Tile
from tandem.engine.layers.products import Products

# With scales of blocks our own kernel is chosen up to so many tokens: for matrices of which a wave of blocks makes many
# outputs, and of few. cuBLAS takes the same time for few tokens as for many.
MAX_OWN_TOKENS = 64
MAX_OWN_TOKENS_NARROW = 256
NARROW_OUTPUTS_PER_SM = 64
# Of so few tokens weights take longer to read than products to be added up with all bits.
MAX_EXACT_TOKENS = 64


class Fp8Products:
    """Products by the kernel that measures best for their size."""

    def __init__(self, device: torch.device, products: Products) -> None:
        """Args: products: our own kernel, on the same device."""
        assert torch.version.cuda is not None
        self._library_has_blocks = library_has_blocks(torch.cuda.get_device_capability(device), torch.version.cuda)
        self._own = products

    def multiply(self, x: Quantized, linear: Fp8Linear, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The projections of x, (num_tokens, out_size) bfloat16; with a residual added to it, in its memory."""
        tile = self._tile(x.num_tokens, linear)
        if tile is not None:
            return self._own.multiply(x, linear, tile, residual)
        product = multiply_by_library(x, linear)
        return product if residual is None else residual.add_(product)

    def _tile(self, num_tokens: int, linear: Fp8Linear) -> Tile | None:
        """Of our own kernel; None: the library is to multiply."""
        has_library = self._library_has_blocks and linear.scale.shape[1] % LIBRARY_BLOCKS_MULTIPLE == 0
        if linear.is_block and has_library:
            is_narrow = len(linear.weight) <= NARROW_OUTPUTS_PER_SM * self._own.device.num_multiprocessors
            if num_tokens > (MAX_OWN_TOKENS_NARROW if is_narrow else MAX_OWN_TOKENS):
                return None
        return self._own.tile(num_tokens, linear)


def multiply_by_library(x: Quantized, linear: Fp8Linear) -> torch.Tensor:
    """By cuBLAS, or by CUTLASS where cuBLAS has no scales of rows."""
    product = torch._scaled_mm(
        x.numbers,
        linear.weight.t(),
        scale_a=x.scales,
        scale_b=linear.scale.t(),
        bias=None if linear.is_block else linear.bias,
        out_dtype=torch.bfloat16,
        # Of blocks each has sums of its own, which are added in float32.
        use_fast_accum=not linear.is_block and x.num_tokens > MAX_EXACT_TOKENS,
    )
    if linear.is_block and linear.bias is not None:
        product += linear.bias
    return product[: x.num_tokens]
