"""Times tiles of balanced_products.cu against other kernels, checks their results, and writes the table of the fastest.

    python -m benchmarks.kernels.balanced --model DIRECTORY ... --tp 1 2 4 --table engine/layers/balanced_tiles.json

Times are microseconds in graphs whose matrices no cache holds. Needs CUDA and compute capability 9.0.
"""

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine_limits import measure_limits, sustained_matmul_rate
from benchmarks.engine_loop import open_model
from benchmarks.kernels.balanced_cases import Case, MatrixSizes, matrices_of
from tandem.engine.layers import cuda_kernel
from tandem.engine.layers.balanced_choice import Choice, Matrix
from tandem.engine.layers.balanced_products import PACKAGE, SOURCE, compile_options_of
from tandem.engine.layers.balanced_tiles import MAX_GROUP_TOKENS, SWIZZLE, BalancedTile, num_stages, tile_of

TOKENS = (24, 32, 48, 64, 96, 128, 144, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024)
# Matrices of the vocabulary multiply rows that need logits only.
MAX_HEAD_TOKENS = 320
KINDS = ("plain", "channel")
# Candidate tiles: outputs and blocks of a cluster, by the most tokens that they are tried for.
SHAPES = {(128, 1): 1024, (128, 2): 1024, (128, 4): 1024, (64, 1): 128, (64, 2): 128}
# Least tokens of a tile in clusters of four.
MIN_CLUSTER_TOKENS = 128
# Least steps of a tile that a block takes, if tiles are cut at will, and equal parts of a tile otherwise.
UNIT, NUM_PARTS = 4, (1, 2, 3)
# Least share of the multiprocessors that equal parts occupy.
MIN_OCCUPANCY = 0.45
NUM_MULTIPROCESSORS = 132
MAX_LIGHT_TOKENS, MIN_LIGHT_STAGES = 96, 3
# Least gain over other kernels.
MIN_GAIN = 1.02
SHARED_MEMORY = 232_448
COMPILE_TIMEOUT_S = 120


class Figure(NamedTuple):
    """Microseconds. Attributes: others: by kernel."""

    matrix: MatrixSizes
    num_tokens: int
    floor: float
    others: dict[str, float]
    tiles: dict[BalancedTile, float]


def tiles_for(matrix: MatrixSizes, num_tokens: int) -> Iterator[BalancedTile]:
    least = -(-num_tokens // MAX_GROUP_TOKENS)
    for (outputs, cluster), most in SHAPES.items():
        for number in (least, least + 1) if least > 1 else (least,):
            tile = tile_of(num_tokens, outputs, cluster, number, UNIT)
            if tile is None or num_tokens > most or (cluster == 4 and tile.tokens < MIN_CLUSTER_TOKENS):
                continue
            light = tile._replace(is_light=True)
            is_light = tile.tokens <= MAX_LIGHT_TOKENS
            if is_light and num_stages(light, SHARED_MEMORY, is_gated=matrix.is_gated) >= MIN_LIGHT_STAGES:
                yield from (light._replace(unit=unit) for unit in units_for(matrix, tile, number))
            yield from (tile._replace(unit=unit) for unit in units_for(matrix, tile, number))


def units_for(matrix: MatrixSizes, tile: BalancedTile, num_token_tiles: int) -> Iterator[int]:
    yield UNIT
    num_steps = -(-matrix.in_size * matrix.number_size // SWIZZLE)
    num_tiles = num_token_tiles * -(-matrix.num_rows // (tile.outputs * tile.cluster))
    for number in NUM_PARTS:
        if MIN_OCCUPANCY <= num_tiles * number * tile.cluster / NUM_MULTIPROCESSORS <= 1:
            yield -(-num_steps // number)


class Compilers:
    """Compiles kernels in processes, begun before this one uses CUDA."""

    def __init__(self, matrices: Iterable[MatrixSizes], tokens: Sequence[int]) -> None:
        self._pool = multiprocessing.get_context("fork").Pool(os.cpu_count())
        self._running: dict[str, Any] = {}
        wanted: dict[str, set[tuple[str, ...]]] = {}
        for matrix in matrices:
            is_gated, is_fp8 = matrix.is_gated, matrix.kind != "plain"
            wanted.setdefault(matrix.kind, set()).update(
                compile_options_of(tile, SHARED_MEMORY, is_gated=is_gated, is_fp8=is_fp8)
                for num_tokens in tokens
                for tile in tiles_for(matrix, num_tokens)
            )
        self._keys = {kind: [(PACKAGE, SOURCE, options) for options in sorted(of)] for kind, of in wanted.items()}
        for kind, keys in self._keys.items():
            self._running[kind] = self._pool.starmap_async(cuda_kernel.compile_kernel, keys, chunksize=1)

    def wait_for(self, kind: str) -> None:
        if (running := self._running.pop(kind, None)) is not None:
            cuda_kernel.keep_compiled(dict(zip(self._keys[kind], running.get(COMPILE_TIMEOUT_S), strict=True)))


def measure(case: Case, num_tokens: int) -> Figure:
    tiles = {}
    case.prepare(num_tokens)
    for tile in tiles_for(case.matrix, num_tokens):
        if wrong := case.wrong(tile):
            print(f"WRONG {case.matrix}, {num_tokens} tokens, {tuple(tile)}: {wrong}", flush=True)
        else:
            tiles[tile] = case.time(case.balanced(tile))
    others = {name: case.time(run) for name, run in case.others().items()}
    return Figure(case.matrix, num_tokens, case.floor, others, tiles)


def choices_of(figures: Sequence[Figure]) -> list[Choice]:
    """Returns the choices of one matrix, by rising numbers of tokens."""
    choices: list[Choice] = []
    for figure in sorted(figures, key=lambda figure: figure.num_tokens):
        choice = Choice(figure.num_tokens, 0)
        best = min(figure.tiles, key=figure.tiles.__getitem__, default=None)
        if best is not None and figure.tiles[best] * MIN_GAIN < min(figure.others.values()):
            number = -(-figure.num_tokens // best.tokens)
            choice = Choice(figure.num_tokens, number, best.outputs, best.cluster, best.unit, best.is_light)
        if choices and choices[-1][1:] == choice[1:]:
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


def show(figures: Sequence[Figure], title: str, console: Console) -> None:
    table = Table("matrix", title=title)
    columns = "tokens", "floor", "others", "best", "x floor", "x others", "tiles: outputs/tokens/cluster/unit"
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number in (2, 6) else "right")
    for figure in figures:
        ranked = sorted(figure.tiles.items(), key=lambda item: item[1])
        best = ranked[0][1] if ranked else math.inf
        table.add_row(
            f"{figure.matrix.kind} {figure.matrix.name}",
            str(figure.num_tokens),
            f"{figure.floor:.1f}",
            " ".join(f"{name} {us:.1f}" for name, us in figure.others.items()),
            f"{best:.1f}",
            f"{best / figure.floor:.2f}",
            f"{best / min(figure.others.values()):.2f}",
            " ".join(f"{'/'.join(map(str, map(int, tile)))}:{us:.1f}" for tile, us in (*ranked[:3], *ranked[-1:])),
        )
    console.print(table)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.kernels.balanced", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, nargs="+", required=True, help="directories with models' config.json")
    parser.add_argument("--tp", type=int, nargs="+", default=(1,), help="GPUs of a worker (default: 1)")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=KINDS, help="weights (default: all)")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="(default: %(default)s)")
    parser.add_argument("--matrices", nargs="+", help="names (default: all)")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="then stop (default: 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--table", type=Path, metavar="FILE", help="also write the fastest tiles to FILE")
    arguments = parser.parse_args(argv)
    models = [open_model(parser, directory) for directory in arguments.model]
    found = (m for tp in arguments.tp for model in models for m in matrices_of(model, tp, arguments.kinds))
    # Several models may have the same.
    matrices = list({m[1:]: m for m in found if m.name in (arguments.matrices or m.name)}.values())
    deadline = time.perf_counter() + arguments.limit
    compilers = Compilers(matrices, arguments.tokens)
    limits = measure_limits()
    rates = f"{limits.matmul_rate / 1e12:.0f} TFLOP/s, {sustained_matmul_rate() / 1e12:.0f} after two seconds"
    print(f"copy {limits.copy_bandwidth / 1e12:.2f} TB/s, matmul {rates}", flush=True)
    figures: list[Figure] = []
    for matrix in matrices:
        compilers.wait_for(matrix.kind)
        case = Case(matrix, limits)
        for num_tokens in arguments.tokens:
            if time.perf_counter() > deadline or (matrix.name == "head" and num_tokens > MAX_HEAD_TOKENS):
                break
            figures.append(measure(case, num_tokens))
            # Kept even if a later one fails.
            if arguments.json:
                arguments.json.write_text(json.dumps([_plain(figure) for figure in figures]) + "\n")
        if arguments.table:
            arguments.table.write_text(table_of(figures))
        print(f"{matrix.name} done, {deadline - time.perf_counter():.0f} s left", flush=True)
    show(figures, "products, microseconds", Console(width=200))
    return 0


def _plain(figure: Figure) -> dict[str, object]:
    by_name = {"/".join(map(str, map(int, tile))): us for tile, us in figure.tiles.items()}
    return figure._asdict() | {"matrix": figure.matrix._asdict(), "tiles": by_name}


if __name__ == "__main__":
    sys.exit(main())
