"""Tiles of balanced_products.cu, and how they are dealt out. Imports no torch."""

import math
from typing import NamedTuple

# Rows per instruction of the tensor cores: of weights, and the multiple and most of tokens. A warp group has those of
# weights, and another group fetches.
GROUP_OUTPUTS, GROUP_THREADS = 64, 128
TOKEN_MULTIPLE, MAX_GROUP_TOKENS = 16, 256
# Larger tiles of tokens are multiples of this, so that fewer kernels are compiled.
FEW_TOKENS, COARSE_MULTIPLE = 64, 32
SWIZZLE_ROWS, SWIZZLE = 8, 128
# Bytes of shared memory for alignment and barriers.
RESERVED = 1536
MAX_STAGES = 12
MIN_STAGES = 2


class BalancedTile(NamedTuple):
    """
    Attributes:
        outputs: weight rows of a block's tile, 64, 128 or, with parts, 192; of a gated product half are of the gate.
        tokens: of a block's tile, a multiple of `token_multiple`.
        cluster: blocks with neighboring outputs, each of which fetches a share of the tokens for all.
        unit: least steps of a tile that a block takes.
        parts: blocks that share the steps of a tile, and sums through each other's shared memory, if more than 1. Then
            cluster and unit are 1.
    """

    outputs: int
    tokens: int
    cluster: int
    unit: int
    parts: int = 1

    @property
    def num_threads(self) -> int:
        return (max(2, self.outputs // GROUP_OUTPUTS) + 1) * GROUP_THREADS

    @property
    def num_blocks(self) -> int:
        """Blocks of a hardware cluster."""
        return self.cluster * self.parts


class Deal(NamedTuple):
    """Work of a launch, in tiles of clusters. Attributes: num_cut: tiles that several clusters may share."""

    num_token_tiles: int
    num_tiles: int
    num_cut: int
    num_steps: int
    num_clusters: int


def token_multiple(outputs: int, cluster: int) -> int:
    num_groups = 2 if outputs == GROUP_OUTPUTS else 1
    return max(TOKEN_MULTIPLE * num_groups, SWIZZLE_ROWS * cluster)


def tile_of(
    num_tokens: int, outputs: int, cluster: int, num_token_tiles: int, unit: int, parts: int = 1
) -> BalancedTile | None:
    """Returns equal tiles of tokens with the least padding; None if they are too large."""
    multiple = token_multiple(outputs, cluster)
    tokens = -(-num_tokens // num_token_tiles)
    if tokens > FEW_TOKENS:
        multiple = max(multiple, COARSE_MULTIPLE)
    tokens = -(-tokens // multiple) * multiple
    return BalancedTile(outputs, tokens, cluster, unit, parts) if tokens <= MAX_GROUP_TOKENS else None


def num_stages(tile: BalancedTile, shared_memory: int, *, is_gated: bool) -> int:
    """Returns the steps in flight. Args: shared_memory: bytes of a block."""
    left = shared_memory - RESERVED - result_bytes(tile, is_gated=is_gated)
    return min(MAX_STAGES, left // ((tile.outputs + tile.tokens) * SWIZZLE))


def result_bytes(tile: BalancedTile, *, is_gated: bool) -> int:
    num_rows = tile.tokens
    if tile.parts > 1:
        num_rows = -(-tile.tokens // (TOKEN_MULTIPLE * tile.parts)) * TOKEN_MULTIPLE
    return num_rows * (tile.outputs * (1 if is_gated else 2) + 16)


def has_room(tile: BalancedTile, shared_memory: int, *, is_gated: bool) -> bool:
    """Returns whether a block's stages, and with parts its sums in their place, fit. Args: shared_memory: its bytes."""
    stages = num_stages(tile, shared_memory, is_gated=is_gated)
    sums = 4 * tile.outputs * tile.tokens if tile.parts > 1 else 0
    return stages >= MIN_STAGES and sums <= stages * (tile.outputs + tile.tokens) * SWIZZLE


def deal(tile: BalancedTile, num_tokens: int, num_weight_rows: int, in_bytes: int, max_clusters: int) -> Deal:
    """Deals out tiles: whole waves, and before them one to two waves that are cut into equal shares.

    With parts, each cluster has one tile.

    Args:
        in_bytes: of a row of inputs.
        max_clusters: that run at once.
    """
    num_token_tiles = -(-num_tokens // tile.tokens)
    num_tiles = num_token_tiles * -(-num_weight_rows // (tile.outputs * tile.cluster))
    num_steps = -(-in_bytes // SWIZZLE)
    if tile.parts > 1:
        return Deal(num_token_tiles, num_tiles, 0, num_steps, num_tiles)
    num_waves, num_left = divmod(num_tiles, max_clusters)
    num_cut = num_left + (max_clusters if num_waves else 0) if num_left else 0
    num_units = math.ceil(num_steps / tile.unit)
    num_clusters = max_clusters if num_waves else min(max_clusters, num_cut * num_units)
    return Deal(num_token_tiles, num_tiles, num_cut, num_steps, num_clusters)
