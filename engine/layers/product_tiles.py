"""Tile sizes of Tandem's product kernels, and their range of use.

Measured on an H200 with the matrices of an 8B model, by `python -m benchmarks.kernels products`.
"""

import functools
from typing import Literal, NamedTuple

from tandem.engine.models.quantization import BLOCK

Kind = Literal["plain", "channel", "block"]

# The library is faster for more tokens.
MAX_TOKENS = 256
MAX_TOKENS_GATED = 128
# In bfloat16 the library is as fast for more tokens or larger matrices.
MAX_TOKENS_PLAIN = 32
MAX_NUMBERS_PLAIN = 2**25
# Tokens of a tile.
FEW_TOKENS, MANY_TOKENS = 64, 128
# More tokens of matrices of few inputs take tiles of FEW_TOKENS too, if these occupy this share of the multiprocessors.
# Larger tiles with splits take a third longer.
MIN_UNSPLIT = 0.4
MAX_UNSPLIT_INPUTS = 4096
MAX_SPLIT_TILE = MANY_TOKENS * 64
# Least useful share of the outputs of whole waves.
MIN_OCCUPANCY = 0.84
# Up to here the library is as fast.
MAX_TOKENS_LIBRARY_GATED = 512
# Bytes of shared memory not used for steps.
RESERVED = 2048


class Tile(NamedTuple):
    """Work of one block.

    Attributes:
        outputs: a gated output's two factors count as one.
        depth: inputs per step.
        num_stages: steps in flight.
        num_splits: blocks that share the inputs. The last adds up their sums.
    """

    tokens: int
    outputs: int
    depth: int
    num_stages: int
    num_warps: int
    num_splits: int = 1


# With their time per output relative to the first.
GATED_TILES = {Tile(128, 128, 64, 3, 8): 1.0, Tile(128, 64, 64, 4, 4): 1.17}


class Product(NamedTuple):
    """Attributes: out_size: a gated matrix has twice as many rows."""

    kind: Kind
    num_tokens: int
    out_size: int
    in_size: int
    is_gated: bool = False


class Device(NamedTuple):
    """Attributes: shared_memory: bytes per block."""

    num_multiprocessors: int
    shared_memory: int


def tile_for(product: Product, device: Device) -> Tile | None:
    """Returns None if another kernel is faster, or tiles do not divide the sizes."""
    if product.kind == "block":
        tile = None if product.is_gated else _block_tile(product, device)
    elif product.is_gated:
        tile = _gated_tile(product, device)
    elif product.kind == "plain":
        tile = _plain_tile(product, device)
    else:
        tile = _channel_tile(product, device)
    if tile is None or not divides(tile, product):
        return None
    tile = tile._replace(num_stages=min(tile.num_stages, max_stages(tile, product, device)))
    return tile if tile.num_stages > 1 else None


@functools.lru_cache(maxsize=1024)
def gated_tile_for(product: Product, device: Device) -> Tile | None:
    """Returns the tile for GatedProducts, in bfloat16; None: the library is faster."""
    if product.kind != "plain" or product.num_tokens <= MAX_TOKENS_LIBRARY_GATED:
        return None
    tiles = [tile for tile in GATED_TILES if divides(tile, product)]
    if not tiles:
        return None

    def cost(tile: Tile) -> float:
        return num_waves(tile) * tile.outputs * GATED_TILES[tile]

    def num_waves(tile: Tile) -> int:
        return -(-num_tiles(tile, product) // device.num_multiprocessors)

    tile = min(tiles, key=cost)
    num_computed = num_waves(tile) * device.num_multiprocessors * tile.tokens * tile.outputs
    return tile if product.num_tokens * product.out_size >= MIN_OCCUPANCY * num_computed else None


def divides(tile: Tile, product: Product) -> bool:
    return product.out_size % tile.outputs == 0 and product.in_size % (tile.depth * tile.num_splits) == 0


def max_stages(tile: Tile, product: Product, device: Device) -> int:
    num_rows = tile.tokens + tile.outputs * (2 if product.is_gated else 1)
    return (device.shared_memory - RESERVED) // (num_rows * tile.depth * (2 if product.kind == "plain" else 1))


def num_tiles(tile: Tile, product: Product) -> int:
    return -(-product.num_tokens // tile.tokens) * (product.out_size // tile.outputs)


def _channel_tile(product: Product, device: Device) -> Tile | None:
    """One wave of blocks, one per multiprocessor."""
    if product.num_tokens > MAX_TOKENS:
        return None
    tile = Tile(FEW_TOKENS, 64, 128, 8, 4)
    is_candidate = product.num_tokens > FEW_TOKENS and product.in_size <= MAX_UNSPLIT_INPUTS
    if is_candidate and MIN_UNSPLIT <= num_tiles(tile, product) / device.num_multiprocessors <= 1:
        return tile
    tile = Tile(_tokens(product), 64, 128, 8, 4)
    if num_tiles(tile, product) <= device.num_multiprocessors:
        return _split(tile, product, device)
    if tile.tokens == FEW_TOKENS:
        return tile._replace(num_stages=6)
    tile = Tile(MANY_TOKENS, 128, 128, 7, 8)
    return tile if num_tiles(tile, product) <= device.num_multiprocessors else None


def _plain_tile(product: Product, device: Device) -> Tile | None:
    is_small = product.out_size * product.in_size <= MAX_NUMBERS_PLAIN
    if product.num_tokens > MAX_TOKENS_PLAIN or not is_small:
        return None
    tile = Tile(FEW_TOKENS, 64, 64, 8, 4)
    return _split(tile, product, device) if num_tiles(tile, product) <= device.num_multiprocessors else None


def _gated_tile(product: Product, device: Device) -> Tile | None:
    """For matrices that occupy the device without splits."""
    is_plain = product.kind == "plain"
    if product.num_tokens > MAX_TOKENS_GATED:
        return None
    if _tokens(product) == FEW_TOKENS:
        tile = Tile(FEW_TOKENS, 64, 128, 4, 4)
    else:
        tile = Tile(MANY_TOKENS, 128, 64, 4, 8) if is_plain else Tile(MANY_TOKENS, 64, 128, 3, 8)
    return tile if 2 * num_tiles(tile, product) >= device.num_multiprocessors else None


def _block_tile(product: Product, device: Device) -> Tile:
    """About as many tiles as multiprocessors; a step has one weight scale."""
    tile = Tile(_tokens(product), BLOCK, BLOCK, 4, 4 if product.num_tokens <= FEW_TOKENS else 8)
    while tile.outputs > 32 and num_tiles(tile, product) < device.num_multiprocessors * 2 // 3:
        tile = tile._replace(outputs=tile.outputs // 2)
    # One block per multiprocessor leaves room for more stages.
    return tile._replace(num_stages=6) if num_tiles(tile, product) <= device.num_multiprocessors else tile


def _split(tile: Tile, product: Product, device: Device) -> Tile:
    """Splits inputs among the blocks of one wave, while each has more steps than are in flight."""
    num_splits = 1
    while True:
        split = tile._replace(num_splits=2 * num_splits)
        num_steps = product.in_size // (split.depth * split.num_splits)
        num_blocks = num_tiles(split, product) * split.num_splits
        if not divides(split, product) or num_steps < tile.num_stages or num_blocks > device.num_multiprocessors:
            return tile._replace(num_splits=num_splits)
        num_splits *= 2


def _tokens(product: Product) -> int:
    return FEW_TOKENS if product.num_tokens <= FEW_TOKENS else MANY_TOKENS
