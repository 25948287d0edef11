"""Sizes that balanced_products.cu multiplies faster than other kernels, and their tiles.

The table is written by `python -m benchmarks.kernels.balanced --table`.
"""

import functools
import json
from bisect import bisect_left
from importlib.resources import files
from typing import NamedTuple

from tandem.engine.layers.balanced_tiles import BalancedTile, tile_of
from tandem.engine.layers.product_tiles import Kind, Product

TABLE = "balanced_tiles.json"


class Choice(NamedTuple):
    """Attributes: num_token_tiles: 0 if another kernel is faster; others: of BalancedTile."""

    max_tokens: int
    num_token_tiles: int
    outputs: int = 0
    cluster: int = 0
    unit: int = 0
    parts: int = 1


class Matrix(NamedTuple):
    """Attributes: out_size: a gated matrix has twice as many rows."""

    kind: Kind
    is_gated: bool
    out_size: int
    in_size: int


@functools.cache
def choices() -> dict[Matrix, list[Choice]]:
    """Returns each measured matrix's choices, by rising numbers of tokens."""
    table = json.loads(files(__package__).joinpath(TABLE).read_text())
    return {Matrix(*matrix): [Choice(*choice) for choice in of_matrix] for matrix, of_matrix in table}


def matrix_of(product: Product) -> Matrix:
    return Matrix(product.kind, product.is_gated, product.out_size, product.in_size)


@functools.cache
def tiles_of(matrix: Matrix) -> frozenset[BalancedTile]:
    """Returns a matrix's tiles for all numbers of tokens."""
    kind, is_gated, out_size, in_size = matrix
    most = max((choice.max_tokens for choice in choices().get(matrix, ())), default=0)
    products = (Product(kind, num_tokens, out_size, in_size, is_gated) for num_tokens in range(1, most + 1))
    return frozenset(tile for product in products if (tile := balanced_tile_for(product)) is not None)


@functools.lru_cache(maxsize=4096)
def balanced_tile_for(product: Product) -> BalancedTile | None:
    """Returns None if another kernel is faster, or nothing was measured."""
    of_matrix = choices().get(matrix_of(product), [])
    index = bisect_left(of_matrix, product.num_tokens, key=lambda choice: choice.max_tokens)
    if index == len(of_matrix) or not of_matrix[index].num_token_tiles:
        return None
    _, number, outputs, cluster, unit, parts = of_matrix[index]
    return tile_of(product.num_tokens, outputs, cluster, number, unit, parts)
