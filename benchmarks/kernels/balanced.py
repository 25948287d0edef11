"""Times tiles of balanced_products.cu against other kernels, checks their results, and writes the table of the fastest.

    python -m benchmarks.kernels.balanced --model DIRECTORY ... --tp 1 2 4 --table engine/layers/balanced_tiles.json

Times are microseconds in graphs whose matrices no cache holds. Needs CUDA and compute capability 9.0.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine_limits import measure_limits, sustained_matmul_rate
from benchmarks.engine_loop import open_model
from benchmarks.kernels.balanced_cases import Case, MatrixSizes, matrices_of
from tandem.engine.floors import Limits
from tandem.engine.layers import cuda_kernel
from tandem.engine.layers.balanced_choice import Choice, Matrix
from tandem.engine.layers.balanced_products import PACKAGE, SOURCE, compile_options_of
from tandem.engine.layers.balanced_tiles import MAX_GROUP_TOKENS, BalancedTile, tile_of

TOKENS = (24, 32, 48, 64, 96, 128, 144, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024)
# Matrices of the vocabulary multiply rows that need logits only.
MAX_HEAD_TOKENS = 320
KINDS = ("plain", "channel")
# Candidate tiles: outputs and blocks of a cluster, and least steps of a tile that a block takes.
OUTPUTS, CLUSTERS, UNITS = (128, 64), (1, 2, 4), (4,)
# Most tokens with narrow tiles.
MAX_NARROW_TOKENS = 128
# Least gain over other kernels.
MIN_GAIN = 1.02
SHARED_MEMORY = 232_448


class Figure(NamedTuple):
    """Microseconds. Attributes: others: by kernel."""

    matrix: MatrixSizes
    num_tokens: int
    floor: float
    others: dict[str, float]
    tiles: dict[BalancedTile, float]


def tiles_for(num_tokens: int) -> Iterator[BalancedTile]:
    least = -(-num_tokens // MAX_GROUP_TOKENS)
    for outputs in OUTPUTS:
        if outputs == OUTPUTS[1] and num_tokens > MAX_NARROW_TOKENS:
            continue
        for cluster in CLUSTERS:
            for number in (least, least + 1) if least > 1 else (least,):
                for unit in UNITS:
                    tile = tile_of(num_tokens, outputs, cluster, number, unit)
                    if tile is not None:
                        yield tile


def compile_all(matrices: Iterable[MatrixSizes], tokens: Sequence[int]) -> int:
    """Compiles all kernels in processes, before this one uses CUDA. Returns their number."""
    variants = {
        compile_options_of(tile, SHARED_MEMORY, is_gated=is_gated, is_fp8=kind != "plain")
        for kind, is_gated in {(matrix.kind, matrix.is_gated) for matrix in matrices}
        for num_tokens in tokens
        for tile in tiles_for(num_tokens)
    }
    keys = [(PACKAGE, SOURCE, options) for options in variants]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        cuda_kernel.keep_compiled(dict(zip(keys, pool.starmap(cuda_kernel.compile_kernel, keys), strict=True)))
    return len(keys)


def measure(case: Case, num_tokens: int) -> Figure:
    tiles = {}
    case.prepare(num_tokens)
    for tile in tiles_for(num_tokens):
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
        best = min(figure.tiles, key=figure.tiles.__getitem__)
        if figure.tiles[best] * MIN_GAIN < min(figure.others.values()):
            number = -(-figure.num_tokens // best.tokens)
            choice = Choice(figure.num_tokens, number, best.outputs, best.cluster, best.unit)
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
        best = ranked[0][1]
        table.add_row(
            f"{figure.matrix.kind} {figure.matrix.name}",
            str(figure.num_tokens),
            f"{figure.floor:.1f}",
            " ".join(f"{name} {us:.1f}" for name, us in figure.others.items()),
            f"{best:.1f}",
            f"{best / figure.floor:.2f}",
            f"{best / min(figure.others.values()):.2f}",
            " ".join(f"{'/'.join(map(str, tile))}:{us:.1f}" for tile, us in (*ranked[:3], *ranked[-1:])),
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--table", type=Path, metavar="FILE", help="also write the fastest tiles to FILE")
    arguments = parser.parse_args(argv)
    models = [open_model(parser, directory) for directory in arguments.model]
    found = (m for model in models for tp in arguments.tp for m in matrices_of(model, tp, arguments.kinds))
    # Several models may have the same.
    matrices = list({m[1:]: m for m in found if m.name in (arguments.matrices or m.name)}.values())
    began = time.perf_counter()
    number = compile_all(matrices, arguments.tokens)
    print(f"{number} kernels compiled in {time.perf_counter() - began:.1f} s", flush=True)
    limits = measure_limits()
    rates = f"{limits.matmul_rate / 1e12:.0f} TFLOP/s, {sustained_matmul_rate() / 1e12:.0f} after two seconds"
    print(f"copy {limits.copy_bandwidth / 1e12:.2f} TB/s, matmul {rates}", flush=True)
    figures = list(_figures(matrices, arguments.tokens, limits, arguments.json))
    show(figures, "products, microseconds", Console(width=200))
    if arguments.table:
        arguments.table.write_text(table_of(figures))
    return 0


def _figures(
    matrices: Sequence[MatrixSizes], tokens: Sequence[int], limits: Limits, file: Path | None
) -> Iterator[Figure]:
    plain: list[dict[str, object]] = []
    for matrix in matrices:
        case = Case(matrix, limits)
        for num_tokens in tokens:
            if matrix.name == "head" and num_tokens > MAX_HEAD_TOKENS:
                continue
            figure = measure(case, num_tokens)
            by_name = {"/".join(map(str, tile)): us for tile, us in figure.tiles.items()}
            plain.append(figure._asdict() | {"matrix": matrix._asdict(), "tiles": by_name})
            # Kept even if a later one fails.
            if file is not None:
                file.write_text(json.dumps(plain) + "\n")
            yield figure
        del case


if __name__ == "__main__":
    sys.exit(main())
