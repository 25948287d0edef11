"""Tile sizes of GroupedExperts.

Measured on an H100 with the matrices of models of 128 and of 8 experts (`python -m benchmarks.kernels experts --tune`).
"""

import functools
from typing import NamedTuple

from tandem.engine.layers.experts.linear import Kind
from tandem.engine.models.quantization import BLOCK

# Bytes of shared memory not used for steps.
RESERVED = 2048
MIN_DEPTH = 64
MIN_STAGES = 2


class Tile(NamedTuple):
    """Outputs of one block for a tile of rows.

    Attributes:
        outputs: a gated output's two factors count as one.
        depth: inputs per step.
        num_stages: steps in flight.
    """

    outputs: int
    depth: int
    num_stages: int
    num_warps: int


class Tiles(NamedTuple):
    """Attributes: rows: pairs of a token and an expert, all of one expert."""

    rows: int
    gate_up: Tile
    down: Tile


class Shape(NamedTuple):
    """
    Attributes:
        hidden_size: inputs of gate and up, and outputs of down.
        size: of one expert's intermediate numbers.
    """

    kind: Kind
    num_experts: int
    hidden_size: int
    size: int


# By kind and rows: for gate and up, and for down.
TILES: dict[Kind, dict[int, tuple[Tile, Tile]]] = {
    "plain": {
        32: (Tile(64, 128, 2, 4), Tile(64, 128, 3, 4)),
        64: (Tile(64, 128, 2, 4), Tile(128, 64, 3, 4)),
        128: (Tile(128, 64, 4, 8), Tile(256, 64, 4, 8)),
    },
    "channel": {
        32: (Tile(64, 128, 5, 4), Tile(64, 256, 3, 4)),
        64: (Tile(64, 128, 3, 4), Tile(128, 128, 3, 4)),
        128: (Tile(64, 128, 3, 4), Tile(128, 128, 3, 8)),
    },
    # The sums of one step and of all take twice the registers, so tiles of more rows are slower.
    "block": {
        32: (Tile(64, 128, 3, 4), Tile(64, 128, 3, 4)),
        64: (Tile(64, 128, 4, 4), Tile(64, 128, 4, 4)),
    },
}


@functools.lru_cache(maxsize=1024)
def tiles_for(num_pairs: int, shape: Shape, shared_memory: int) -> Tiles:
    """Chooses by sizes alone, never by routing, so that requests do not affect each other's results.

    Args:
        num_pairs: tokens times experts of each.
        shared_memory: bytes per block.
    """
    rows = rows_for(num_pairs / shape.num_experts, shape.kind)
    gate_up, down = TILES[shape.kind][rows]
    return Tiles(
        rows,
        _fit(gate_up, 2, rows, shape.hidden_size, shape.kind, shared_memory),
        _fit(down, 1, rows, shape.size, shape.kind, shared_memory),
    )


def rows_for(rows_of_expert: float, kind: Kind) -> int:
    """Returns the fewest rows that hold an expert's average: a second tile gets the weights from the L2 cache."""
    choices = sorted(TILES[kind])
    return next((rows for rows in choices if rows >= rows_of_expert), choices[-1])


def num_bytes(tile: Tile, num_factors: int, rows: int, kind: Kind) -> int:
    """Returns the shared memory of a block's steps. Args: num_factors: matrices; 2 for gate and up."""
    return tile.num_stages * (num_factors * tile.outputs + rows) * tile.depth * (2 if kind == "plain" else 1)


def _fit(tile: Tile, num_factors: int, rows: int, in_size: int, kind: Kind, shared_memory: int) -> Tile:
    """Shrinks the steps to the inputs and to the memory. With block scales a step stays one block deep."""
    min_depth = BLOCK if kind == "block" else MIN_DEPTH
    while tile.depth > min_depth and tile.depth // 2 >= in_size:
        tile = tile._replace(depth=tile.depth // 2)
    while num_bytes(tile, num_factors, rows, kind) > shared_memory - RESERVED:
        if tile.num_stages > MIN_STAGES:
            tile = tile._replace(num_stages=tile.num_stages - 1)
        elif tile.depth > min_depth:
            tile = tile._replace(depth=tile.depth // 2)
        else:
            break
    return tile
