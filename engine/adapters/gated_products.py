"""Gated products of many tokens with adapters, by a Triton kernel. Needs CUDA."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tandem.engine.adapters.row_products import held_rank
from tandem.engine.adapters.rows import AdapterRows
from tandem.engine.adapters.weights import AdapterWeights
from tandem.engine.layers.gated_products import GatedProducts, multiply_tile, place_of, store_gated
from tandem.engine.layers.linear import LinearBase
from tandem.engine.layers.product_tiles import Tile, num_tiles
from tandem.engine.layers.products import product_of

# The products with B of larger ranks do not fit in shared memory beside the base's.
MAX_RANK = 16


class GatedAdapterProducts:
    """Adds the adapters' products to the sums of GatedProducts, so that the projections never reach memory."""

    def __init__(self, device: torch.device) -> None:
        self._base = GatedProducts(device)
        self._num_multiprocessors: int = torch.cuda.get_device_properties(device).multi_processor_count

    def tile(self, num_tokens: int, linear: LinearBase, weights: AdapterWeights) -> Tile | None:
        """Returns None if another kernel is faster, or this one does not compute it."""
        return self._base.tile(num_tokens, linear) if held_rank(weights) <= MAX_RANK else None

    def multiply(
        self, x: torch.Tensor, linear: LinearBase, tile: Tile, shrunk: torch.Tensor, rows: AdapterRows
    ) -> torch.Tensor:
        """Returns silu(first half of the projections of x) * second half, (num_tokens, out_size / 2) bfloat16.

        Args:
            x: (num_tokens, in_size) bfloat16, contiguous.
            shrunk: (num_splits, 2, num_tokens, rank) float32, of tokens with adapters.
        """
        weights = linear.adapters
        assert weights is not None
        num_tokens, in_size = x.shape
        product = product_of(num_tokens, linear, is_gated=True)
        out = torch.empty(num_tokens, product.out_size, dtype=torch.bfloat16, device=x.device)
        halves = linear.weight.view(2, product.out_size, in_size)
        num_blocks = min(num_tiles(tile, product), self._num_multiprocessors)
        launch: Any = _gated[(num_blocks,)]
        launch(
            TensorDescriptor.from_tensor(x, [tile.tokens, tile.depth]),
            TensorDescriptor.from_tensor(halves, [2, tile.outputs, tile.depth]),
            TensorDescriptor.from_tensor(out, [tile.tokens, tile.outputs]),
            shrunk,
            weights.b,
            weights.ranks,
            rows.row_slots,
            num_tokens,
            product.out_size,
            in_size,
            num_blocks,
            weights.max_rank,
            TOKENS=tile.tokens,
            OUTPUTS=tile.outputs,
            DEPTH=tile.depth,
            NUM_SPLITS=len(shrunk),
            RANK=shrunk.shape[-1],
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return out


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def _gated(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    shrunk,
    b,
    ranks,
    row_slots,
    num_tokens,
    out_size,
    in_size,
    num_blocks,
    max_rank,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    RANK: tl.constexpr,
):
    num_tiles = tl.cdiv(num_tokens, TOKENS) * (out_size // OUTPUTS)
    for tile in tl.range(tl.program_id(0), num_tiles, num_blocks):
        token, output = place_of(tile, num_tokens, out_size, TOKENS, OUTPUTS)
        sums = multiply_tile(x, weight, token, output, in_size, TOKENS, OUTPUTS, DEPTH)
        tokens = token + tl.arange(0, TOKENS)
        slots = tl.load(row_slots + tokens, mask=tokens < num_tokens, other=-1)
        slot = tl.max(slots, 0)
        while slot >= 0:
            left, right = _of_adapter(
                shrunk, b, ranks, slot, tokens, slots == slot, num_tokens, output, out_size, max_rank, OUTPUTS,
                NUM_SPLITS, RANK,
            )  # fmt: skip
            sums = tl.dot(left, right, sums)
            slot = tl.max(tl.where(slots < slot, slots, -1), 0)
        store_gated(out, token, output, sums, TOKENS, OUTPUTS)


@triton.jit
def _of_adapter(  # type: ignore[no-untyped-def]
    shrunk,
    b,
    ranks,
    slot,
    tokens,
    is_own,
    num_tokens,
    output,
    out_size,
    max_rank,
    OUTPUTS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    RANK: tl.constexpr,
):
    """Returns the factors of both halves side by side, and B's with zeros where another half's factors are."""
    k, j = tl.arange(0, 2 * RANK), tl.arange(0, 2 * OUTPUTS)
    half, r = k // RANK, k % RANK
    has_rank = r < tl.load(ranks + slot * 2 + half)
    left = tl.zeros((tokens.shape[0], 2 * RANK), dtype=tl.float32)
    mask = is_own[:, None] & has_rank[None, :]
    for split in tl.static_range(NUM_SPLITS):
        numbers = tokens[:, None].to(tl.int64) + ((split * 2 + half) * num_tokens)[None, :]
        left += tl.load(shrunk + numbers * RANK + r[None, :], mask=mask, other=0.0)
    factors = b + slot.to(tl.int64) * max_rank * 2 * out_size + output
    places = half.to(tl.int64) * max_rank * out_size + r * out_size
    mask = has_rank[:, None] & (half[:, None] == (j // OUTPUTS)[None, :])
    right = tl.load(factors + places[:, None] + (j % OUTPUTS)[None, :], mask=mask, other=0.0)
    return left.to(right.dtype), right
