"""Gated products of many tokens, by a Triton kernel. Needs CUDA."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tandem.engine.layers.linear import LinearBase
from tandem.engine.layers.product_tiles import Device, Tile, gated_tile_for, num_tiles
from tandem.engine.layers.products import product_of

# This many token tiles share outputs in turn, so weights come from the L2 cache.
GROUP = tl.constexpr(8)
# Tiles were measured on Hopper.
CAPABILITY = 9


class GatedProducts:
    """Computes both projections of a tile in one accumulator and writes silu(gate) * up. The projections, twice as
    large, never reach memory.

    One wave of blocks takes all tiles in turn. The tensor memory accelerator fetches inputs.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_measured = torch.cuda.get_device_capability(device)[0] == CAPABILITY
        properties: Any = torch.cuda.get_device_properties(device)
        self._device = Device(properties.multi_processor_count, properties.shared_memory_per_block_optin)

    def tile(self, num_tokens: int, linear: LinearBase) -> Tile | None:
        weight = linear.weight
        if not self._is_measured or weight.dtype is not torch.bfloat16 or linear.bias is not None:
            return None
        return gated_tile_for(product_of(num_tokens, linear, is_gated=True), self._device)

    def multiply(self, x: torch.Tensor, linear: LinearBase, tile: Tile) -> torch.Tensor:
        """Returns silu(first half of the projections of x) * second half, (num_tokens, out_size / 2) bfloat16, computed
        in float32.

        Args:
            x: (num_tokens, in_size) bfloat16, contiguous.
        """
        num_tokens, in_size = x.shape
        product = product_of(num_tokens, linear, is_gated=True)
        out = torch.empty(num_tokens, product.out_size, dtype=torch.bfloat16, device=x.device)
        halves = linear.weight.view(2, product.out_size, in_size)
        num_blocks = min(num_tiles(tile, product), self._device.num_multiprocessors)
        launch: Any = _gated[(num_blocks,)]
        launch(
            TensorDescriptor.from_tensor(x, [tile.tokens, tile.depth]),
            TensorDescriptor.from_tensor(halves, [2, tile.outputs, tile.depth]),
            TensorDescriptor.from_tensor(out, [tile.tokens, tile.outputs]),
            num_tokens,
            product.out_size,
            in_size,
            num_blocks,
            TOKENS=tile.tokens,
            OUTPUTS=tile.outputs,
            DEPTH=tile.depth,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return out


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def _gated(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    num_tokens,
    out_size,
    in_size,
    num_blocks,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    num_tiles = tl.cdiv(num_tokens, TOKENS) * (out_size // OUTPUTS)
    for tile in tl.range(tl.program_id(0), num_tiles, num_blocks, flatten=True):
        token, output = place_of(tile, num_tokens, out_size, TOKENS, OUTPUTS)
        sums = multiply_tile(x, weight, token, output, in_size, TOKENS, OUTPUTS, DEPTH)
        store_gated(out, token, output, sums, TOKENS, OUTPUTS)


@triton.jit
def place_of(tile, num_tokens, out_size, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the first token and the first output of a tile."""
    num_token_tiles = tl.cdiv(num_tokens, TOKENS)
    group_size = GROUP * (out_size // OUTPUTS)
    first = tile // group_size * GROUP
    width = tl.minimum(num_token_tiles - first, GROUP)
    return (first + tile % group_size % width) * TOKENS, tile % group_size // width * OUTPUTS


@triton.jit
def multiply_tile(  # type: ignore[no-untyped-def]
    x, weight, token, output, in_size, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr
):
    """Returns a tile's gates and their factors side by side, (TOKENS, 2 * OUTPUTS) float32."""
    sums = tl.zeros((TOKENS, 2 * OUTPUTS), dtype=tl.float32)
    for step in range(in_size // DEPTH):
        a = x.load([token, step * DEPTH])
        b = weight.load([0, output, step * DEPTH]).reshape(2 * OUTPUTS, DEPTH)
        sums = tl.dot(a, b.T, sums)
    return sums


@triton.jit
def store_gated(out, token, output, sums, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr):  # type: ignore[no-untyped-def]
    gate, up = sums.reshape(TOKENS, 2, OUTPUTS).permute(0, 2, 1).split()
    gated = gate / (1 + tl.exp(-gate)) * up
    out.store([token, output], gated.to(tl.bfloat16))
