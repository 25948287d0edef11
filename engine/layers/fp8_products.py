"""FP8 matrix products. Needs CUDA."""

import torch

from tandem.engine.layers.fp8_linear import LIBRARY_BLOCKS_MULTIPLE, Fp8Linear, library_has_blocks
from tandem.engine.layers.fp8_quantize import Quantized
from tandem.engine.layers.product_tiles import Tile
from tandem.engine.layers.products import Products

# With block scales, Products is faster up to these token counts, for wide and for narrow matrices.
MAX_OWN_TOKENS = 64
MAX_OWN_TOKENS_NARROW = 256
NARROW_OUTPUTS_PER_SM = 64
# Up to this many tokens, reading weights takes longer than exact accumulation.
MAX_EXACT_TOKENS = 64


class Fp8Products:
    def __init__(self, device: torch.device, products: Products) -> None:
        assert torch.version.cuda is not None
        self._library_has_blocks = library_has_blocks(torch.cuda.get_device_capability(device), torch.version.cuda)
        self._own = products

    def multiply(self, x: Quantized, linear: Fp8Linear, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Returns (num_tokens, out_size) bfloat16; adds to `residual` in place if given."""
        tile = self._tile(x.num_tokens, linear)
        if tile is not None:
            return self._own.multiply(x, linear, tile, residual)
        product = multiply_by_library(x, linear)
        return product if residual is None else residual.add_(product)

    def _tile(self, num_tokens: int, linear: Fp8Linear) -> Tile | None:
        has_library = self._library_has_blocks and linear.scale.shape[1] % LIBRARY_BLOCKS_MULTIPLE == 0
        if linear.is_block and has_library:
            is_narrow = len(linear.weight) <= NARROW_OUTPUTS_PER_SM * self._own.device.num_multiprocessors
            if num_tokens > (MAX_OWN_TOKENS_NARROW if is_narrow else MAX_OWN_TOKENS):
                return None
        return self._own.tile(num_tokens, linear)


def multiply_by_library(x: Quantized, linear: Fp8Linear) -> torch.Tensor:
    """Multiplies by cuBLAS, or by CUTLASS where cuBLAS lacks row scales."""
    product = torch._scaled_mm(
        x.numbers,
        linear.weight.t(),
        scale_a=x.scales,
        scale_b=linear.scale.t(),
        bias=None if linear.is_block else linear.bias,
        out_dtype=torch.bfloat16,
        # Block sums are always added in float32.
        use_fast_accum=not linear.is_block and x.num_tokens > MAX_EXACT_TOKENS,
    )
    if linear.is_block and linear.bias is not None:
        product += linear.bias
    return product[: x.num_tokens]
