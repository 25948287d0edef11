"""Candidate tiles of balanced_products.cu, and the table of the fastest. Imports no CUDA."""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tandem.engine.floors import BYTES_PER_NUMBER, FP8_BYTES_PER_NUMBER
from tandem.engine.layers.balanced_choice import Choice, Matrix
from tandem.engine.layers.balanced_tiles import MAX_GROUP_TOKENS, SWIZZLE, BalancedTile, has_room, tile_of
from tandem.engine.layers.product_tiles import Kind
from tandem.engine.models.config import ModelConfig

# Fewer tokens have kernels of their own.
MIN_TOKENS = 17
# Candidate tiles: outputs and blocks of a cluster, by the most tokens that they are tried for.
MAX_NARROW_TOKENS = 128
SHAPES = {(128, 1): 1024, (128, 2): 1024, (64, 1): MAX_NARROW_TOKENS, (64, 2): MAX_NARROW_TOKENS}
# Least steps of a tile that a block takes, if tiles are cut at will. Otherwise equal parts of a tile: summed through
# global memory, or through shared memory by the blocks of a cluster.
UNITS, NUM_PARTS = (1, 4), (1, 2, 3)
PART_OUTPUTS, PARTS, MIN_STEPS = (128, 192), (2, 3, 4, 5, 8), 4
# Least share of the multiprocessors that equal parts occupy.
MIN_OCCUPANCY = 0.45
NUM_MULTIPROCESSORS = 132
# Least gain over other kernels, because those lose less among different neighbors. Least sum of the gains that a
# compiled kernel adds, over all numbers of tokens.
MIN_GAIN = 1.035
KERNEL_GAIN = 0.06
# Tiles of a figure that are timed again for fewer tokens.
NUM_FASTEST = 3
# Bytes of a block.
SHARED_MEMORY = 232_448


class MatrixSizes(NamedTuple):
    """Attributes: out_size: a gated matrix has twice as many rows; adds: to a residual."""

    name: str
    kind: Kind
    is_gated: bool
    out_size: int
    in_size: int
    adds: bool

    @property
    def num_rows(self) -> int:
        return self.out_size * (2 if self.is_gated else 1)

    @property
    def number_size(self) -> int:
        return BYTES_PER_NUMBER if self.kind == "plain" else FP8_BYTES_PER_NUMBER


def matrices_of(model: ModelConfig, tp: int, kinds: Sequence[Kind]) -> Iterator[MatrixSizes]:
    """Yields the matrices of one of `tp` ranks. The vocabulary's are never FP8."""
    q_size, kv_size = model.num_q_heads * model.head_dim // tp, model.num_kv_heads * model.head_dim // tp
    hidden, inner, adds = model.hidden_size, model.intermediate_size // tp, tp == 1
    for kind in kinds:
        yield MatrixSizes("qkv", kind, False, q_size + 2 * kv_size, hidden, False)
        yield MatrixSizes("o", kind, False, hidden, q_size, adds)
        yield MatrixSizes("gate_up", kind, True, inner, hidden, False)
        yield MatrixSizes("down", kind, False, hidden, inner, adds)
    if "plain" in kinds:
        yield MatrixSizes("head", "plain", False, model.vocab_size // tp, hidden, False)


class Figure(NamedTuple):
    """Microseconds. Attributes: others: by kernel."""

    matrix: MatrixSizes
    num_tokens: int
    floor: float
    others: dict[str, float]
    tiles: dict[BalancedTile, float]


def tiles_for(matrix: MatrixSizes, num_tokens: int) -> Iterator[BalancedTile]:
    least = -(-num_tokens // MAX_GROUP_TOKENS)
    numbers = (least, least + 1) if num_tokens > MAX_NARROW_TOKENS else (least,)
    for (outputs, cluster), most in SHAPES.items():
        for number in numbers:
            tile = tile_of(num_tokens, outputs, cluster, number, 1)
            if tile is not None and num_tokens <= most:
                yield from (tile._replace(unit=unit) for unit in units_for(matrix, tile, number))
    for outputs, parts, number in itertools.product(PART_OUTPUTS, PARTS, numbers):
        tile = tile_of(num_tokens, outputs, 1, number, 1, parts)
        if tile is not None and _is_balanced(matrix, tile, number):
            yield tile


def candidates_for(matrix: MatrixSizes, num_tokens: int, whole: Figure | None) -> list[BalancedTile]:
    """Args: whole: figure of more tokens. If it has the same tiles, its fastest suffice."""
    tiles = list(tiles_for(matrix, num_tokens))
    if whole is None or set(whole.tiles) != set(tiles):
        return tiles
    return sorted(tiles, key=whole.tiles.__getitem__)[:NUM_FASTEST]


def units_for(matrix: MatrixSizes, tile: BalancedTile, num_token_tiles: int) -> Iterator[int]:
    yield from UNITS
    num_steps = -(-matrix.in_size * matrix.number_size // SWIZZLE)
    num_tiles = num_token_tiles * -(-matrix.num_rows // (tile.outputs * tile.cluster))
    for number in NUM_PARTS:
        if MIN_OCCUPANCY <= num_tiles * number * tile.cluster / NUM_MULTIPROCESSORS <= 1:
            yield -(-num_steps // number)


def _is_balanced(matrix: MatrixSizes, tile: BalancedTile, num_token_tiles: int) -> bool:
    """Args: tile: with parts."""
    num_blocks = num_token_tiles * -(-matrix.num_rows // tile.outputs) * tile.parts
    is_cut = MIN_STEPS * tile.parts * SWIZZLE <= matrix.in_size * matrix.number_size
    is_one_wave = MIN_OCCUPANCY <= num_blocks / NUM_MULTIPROCESSORS <= 1
    return is_cut and is_one_wave and has_room(tile, SHARED_MEMORY, is_gated=matrix.is_gated)


def kernels_for(figures: Sequence[Figure]) -> set[BalancedTile]:
    """Returns the tiles worth compiling for one matrix, of any unit: 0. An engine compiles them all at its start."""
    every = {tile._replace(unit=0) for figure in figures for tile in figure.tiles}
    chosen: set[BalancedTile] = set()

    def speed(kernels: set[BalancedTile]) -> float:
        """Returns the sum of the speeds relative to other kernels, which take the rest."""
        ratios = (min(f.others.values()) / min(_of(f, kernels).values(), default=math.inf) for f in figures)
        return sum(ratio if ratio > MIN_GAIN else 1.0 for ratio in ratios)

    while every - chosen:
        best = max(sorted(every - chosen), key=lambda kernel: speed(chosen | {kernel}))
        if speed(chosen | {best}) - speed(chosen) < KERNEL_GAIN:
            break
        chosen.add(best)
    return chosen


def _of(figure: Figure, kernels: set[BalancedTile]) -> dict[BalancedTile, float]:
    return {tile: us for tile, us in figure.tiles.items() if tile._replace(unit=0) in kernels}


def choices_of(figures: Sequence[Figure]) -> list[Choice]:
    """Returns the choices of one matrix, by rising numbers of tokens."""
    choices = [Choice(MIN_TOKENS - 1, 0)]
    kernels = kernels_for(figures)
    for figure in sorted(figures, key=lambda figure: figure.num_tokens):
        choice = Choice(figure.num_tokens, 0)
        tiles = _of(figure, kernels)
        if tiles and min(tiles.values()) * MIN_GAIN < min(figure.others.values()):
            best = min(tiles, key=tiles.__getitem__)
            number = -(-figure.num_tokens // best.tokens)
            choice = Choice(figure.num_tokens, number, best.outputs, best.cluster, best.unit, best.parts)
        if choices[-1][1:] == choice[1:]:
            choices.pop()
        choices.append(choice)
    return choices


def table_of(figures: Sequence[Figure]) -> str:
    """Returns the table in balanced_tiles.json's format, a line per matrix."""
    of_matrices: dict[Matrix, list[Figure]] = {}
    for figure in figures:
        m = figure.matrix
        of_matrices.setdefault(Matrix(m.kind, m.is_gated, m.out_size, m.in_size), []).append(figure)
    lines = [json.dumps([matrix, choices_of(of_matrix)]) for matrix, of_matrix in sorted(of_matrices.items())]
    return "[\n" + ",\n".join(lines) + "\n]\n"
