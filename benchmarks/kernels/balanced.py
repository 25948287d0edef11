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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine_limits import measure_limits, sustained_matmul_rate
from benchmarks.engine_loop import open_model
from benchmarks.kernels.balanced_cases import Case
from benchmarks.kernels.balanced_table import (
    NUM_FASTEST,
    SHARED_MEMORY,
    Figure,
    MatrixSizes,
    candidates_for,
    matrices_of,
    table_of,
    tiles_for,
)
from tandem.engine.layers import cuda_kernel
from tandem.engine.layers.balanced_products import PACKAGE, SOURCE, compile_options_of
from tandem.engine.layers.balanced_tiles import BalancedTile

# Rows of decode graphs, then of prefill and mixed graphs: other kernels' times jump between them.
TOKENS = (*range(24, 256, 8), *range(256, 512, 64), *range(512, 1024, 128), 1024, 1152)
# Matrices of the vocabulary multiply rows that need logits only.
MAX_HEAD_TOKENS = 320
KINDS = ("plain", "channel")
COMPILE_TIMEOUT_S = 120


class Compilers:
    """Compiles kernels in processes, begun before this one uses CUDA. They keep the results in files."""

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
        for kind, of_kind in wanted.items():
            keys = [(PACKAGE, SOURCE, options) for options in sorted(of_kind)]
            self._running[kind] = self._pool.starmap_async(cuda_kernel.compile_kernel, keys, chunksize=1)

    def wait_for(self, kind: str) -> None:
        if (running := self._running.pop(kind, None)) is not None:
            running.get(COMPILE_TIMEOUT_S)


def measure(case: Case, num_tokens: int, candidates: Sequence[BalancedTile]) -> Figure:
    tiles = {}
    case.prepare(num_tokens)
    for tile in candidates:
        try:
            wrong = case.wrong(tile)
        except RuntimeError as error:
            # Of clusters that the GPU cannot launch.
            wrong = str(error)
        if wrong:
            print(f"WRONG {case.matrix}, {num_tokens} tokens, {tuple(tile)}: {wrong}", flush=True)
        else:
            tiles[tile] = case.time(case.balanced(tile))
    others = {name: case.time(run) for name, run in case.others().items()}
    return Figure(case.matrix, num_tokens, case.floor, others, tiles)


def show(figures: Sequence[Figure], title: str, console: Console) -> None:
    table = Table("matrix", title=title)
    columns = "tokens", "floor", "others", "best", "x floor", "x others", "tiles: outputs/tokens/cluster/unit/parts"
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
        whole: Figure | None = None
        for num_tokens in sorted(arguments.tokens, reverse=True):
            if time.perf_counter() > deadline:
                break
            if matrix.name == "head" and num_tokens > MAX_HEAD_TOKENS:
                continue
            tiles = candidates_for(matrix, num_tokens, whole)
            figures.append(measure(case, num_tokens, tiles))
            if len(tiles) > NUM_FASTEST:
                whole = figures[-1]
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
