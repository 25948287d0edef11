"""Times tiles of balanced_products.cu against other kernels, and checks their results. Needs CUDA.

    python -m benchmarks.kernels.balanced --model DIRECTORY --tp 1 --tokens 64 128 256 --json FILE

Times are microseconds in graphs whose matrices no cache holds.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine_limits import measure_limits, sustained_matmul_rate
from benchmarks.engine_loop import open_model
from tandem.engine.floors import Limits
from tandem.engine.layers import cuda_kernel
from tandem.engine.layers.balanced_products import BalancedProducts, macros
from tandem.engine.layers.balanced_tiles import BalancedTile, num_stages, tile_of
from tandem.engine.layers.cuda_kernel import compile_options
from tandem.engine.layers.linear import Linear
from tandem.engine.models.config import ModelConfig

TOKENS = (32, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 1024)
CAPABILITY, SHARED_MEMORY = (9, 0), 232_448
PACKAGE, SOURCE = "tandem.engine.layers", "balanced_products"
# Minimum size of all matrices of a graph, so that no cache holds them, and its time.
MIN_BYTES = 2**28
MIN_US = 300.0
NUM_REPLAYS = 5
WEIGHT_SCALE = 0.02
OUTPUTS, CLUSTERS, UNITS = (128, 64), (1, 2, 4), (4, 12)
# Most tokens with narrow tiles.
MAX_NARROW_TOKENS = 128


class Matrix(NamedTuple):
    """Attributes: num_rows: weight rows; adds: to a residual."""

    name: str
    num_rows: int
    in_size: int
    is_gated: bool
    adds: bool


class Figure(NamedTuple):
    matrix: Matrix
    num_tokens: int
    floor: float
    library: float
    present: float
    tiles: dict[BalancedTile, float]


def matrices_of(model: ModelConfig, tp: int) -> list[Matrix]:
    q_size, kv_size = model.num_q_heads * model.head_dim // tp, model.num_kv_heads * model.head_dim // tp
    inner, adds = model.intermediate_size // tp, tp == 1
    return [
        Matrix("qkv", q_size + 2 * kv_size, model.hidden_size, False, False),
        Matrix("o", model.hidden_size, q_size, False, adds),
        Matrix("gate_up", 2 * inner, model.hidden_size, True, False),
        Matrix("down", model.hidden_size, inner, False, adds),
    ]


def tiles_for(num_tokens: int) -> Iterator[BalancedTile]:
    for outputs in OUTPUTS:
        if outputs == 64 and num_tokens > MAX_NARROW_TOKENS:
            continue
        for cluster in map(int, os.environ.get("CLUSTERS", "1 2 4").split()):
            least = -(-num_tokens // 256)
            for number in (least, least + 1) if num_tokens > 256 else (least,):
                for unit in UNITS:
                    tile = tile_of(num_tokens, outputs, cluster, number, unit)
                    if tile is not None:
                        yield tile


def compile_all(matrices: Sequence[Matrix], tokens: Sequence[int]) -> int:
    """Compiles all kernels in processes, before this one uses CUDA. Returns their number."""
    wanted = set()
    for is_gated in {matrix.is_gated for matrix in matrices}:
        for tile in {tile._replace(unit=0) for num_tokens in tokens for tile in tiles_for(num_tokens)}:
            stages = num_stages(tile, SHARED_MEMORY, is_gated=is_gated)
            options = compile_options(macros(tile, stages, is_gated=is_gated, is_fp8=False), CAPABILITY, is_specific=True)
            wanted.add((PACKAGE, SOURCE, options))
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        binaries = dict(zip(wanted, pool.starmap(cuda_kernel.compile_kernel, wanted), strict=True))
    of_processes = cuda_kernel.compile_kernel
    cuda_kernel.compile_kernel = lambda *key: binaries.get(key) or of_processes(*key)  # type: ignore[assignment]
    return len(wanted)


class Times:
    def __init__(self, limits: Limits) -> None:
        from flashinfer.activation import silu_and_mul

        from tandem.engine.layers.gated_products import GatedProducts
        from tandem.engine.layers.products import Products

        self._gate = silu_and_mul
        self._limits = limits
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._balanced = BalancedProducts(self._device)
        self._products = Products(self._device)
        self._gated = GatedProducts(self._device)
        self._linears: dict[Matrix, list[Linear]] = {}

    def measure(self, matrix: Matrix, num_tokens: int) -> Figure:
        if matrix not in self._linears:
            self._linears.clear()
            num_bytes = 2 * matrix.num_rows * matrix.in_size
            linears = [
                Linear([matrix.num_rows], matrix.in_size, False, torch.bfloat16, self._device)
                for _ in range(max(2, -(-MIN_BYTES // num_bytes)))
            ]
            for linear in linears:
                linear.weight.normal_(0, WEIGHT_SCALE)
            self._linears[matrix] = linears
        linears = self._linears[matrix]
        numbers = matrix.num_rows * matrix.in_size
        floor = max(2 * numbers / self._limits.copy_bandwidth, 2 * numbers * num_tokens / self._limits.matmul_rate) * 1e6
        x = torch.randn(num_tokens, matrix.in_size, device=self._device).bfloat16()
        residual = torch.randn(num_tokens, matrix.num_rows, device=self._device).bfloat16() if matrix.adds else None
        sums = None if residual is None else residual.clone()

        def library(linear: Linear) -> torch.Tensor:
            if sums is not None:
                return torch.addmm(sums, x, linear.weight.t(), out=sums)
            product = torch.mm(x, linear.weight.t())
            return self._gate(product) if matrix.is_gated else product

        def present(linear: Linear) -> torch.Tensor:
            tile = self._products.tile(num_tokens, linear, is_gated=matrix.is_gated)
            if tile is not None:
                return self._products.multiply(x, linear, tile, sums, is_gated=matrix.is_gated)
            if matrix.is_gated:
                tile = self._gated.tile(num_tokens, linear)
                if tile is not None:
                    return self._gated.multiply(x, linear, tile)
            return library(linear)

        expected = self._expected(matrix, x, residual, linears[0])
        repeats = max(1, round(MIN_US / (floor * len(linears))))

        def time_of(run: Callable[[Linear], object]) -> float:
            return _median_us(lambda: [run(linear) for _ in range(repeats) for linear in linears]) / (
                repeats * len(linears)
            )

        tiles = {}
        for tile in tiles_for(num_tokens):
            try:
                self._check(matrix, x, residual, linears[0], tile, expected)
            except RuntimeError as error:
                if "tokens" not in str(error):
                    raise
                print(f"WRONG {error}", flush=True)
                continue
            tiles[tile] = time_of(
                lambda linear, tile=tile: self._balanced.multiply(x, linear, tile, sums, is_gated=matrix.is_gated)
            )
        return Figure(matrix, num_tokens, floor, time_of(library), time_of(present), tiles)

    def _expected(
        self, matrix: Matrix, x: torch.Tensor, residual: torch.Tensor | None, linear: Linear
    ) -> torch.Tensor:
        product = torch.mm(x, linear.weight.t()).float()
        if matrix.is_gated:
            gate, up = product.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate) * up
        return product if residual is None else product + residual.float()

    def _check(
        self,
        matrix: Matrix,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        linear: Linear,
        tile: BalancedTile,
        expected: torch.Tensor,
    ) -> None:
        """Raises RuntimeError if results are wrong, or depend on other rows or on the run."""

        def run(x: torch.Tensor) -> torch.Tensor:
            added = None if residual is None else residual.clone()
            return self._balanced.multiply(x, linear, tile, added, is_gated=matrix.is_gated)

        result = run(x)
        error = ((result.float() - expected).abs() / (expected.abs() + expected.std())).max().item()
        name = f"{matrix.name}, {len(x)} tokens, {tuple(tile)}"
        if not error < 0.03:
            wrong = ((result.float() - expected).abs() > 0.03 * (expected.abs() + expected.std())).nonzero()
            raise RuntimeError(f"{name}: error {error}, {len(wrong)} wrong, first {wrong[:3].tolist()}")
        others = x.clone()
        others[len(x) // 2 :] = torch.randn_like(others[len(x) // 2 :])
        if not torch.equal(run(others)[: len(x) // 2], result[: len(x) // 2]) or not torch.equal(run(x), result):
            raise RuntimeError(f"{name}: results vary")


def _median_us(run: Callable[[], object]) -> float:
    graph = torch.cuda.CUDAGraph()
    run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(NUM_REPLAYS)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) * 1e3 for start, end in events)[NUM_REPLAYS // 2]


def show(figures: Sequence[Figure], title: str, console: Console) -> None:
    table = Table("matrix", title=title)
    for column in ("tokens", "floor", "library", "present", "best", "x floor", "x library", "tiles"):
        table.add_column(column, justify="left" if column == "tiles" else "right")
    for figure in figures:
        best = min(figure.tiles.values(), default=0.0)
        ranked = sorted(figure.tiles.items(), key=lambda item: item[1])
        tiles = " ".join(f"{'/'.join(map(str, tile))}:{us:.1f}" for tile, us in (*ranked[:3], *ranked[-1:]))
        table.add_row(
            figure.matrix.name,
            str(figure.num_tokens),
            *(f"{us:.1f}" for us in (figure.floor, figure.library, figure.present, best)),
            f"{best / figure.floor:.2f}",
            f"{best / figure.library:.2f}",
            tiles,
        )
    console.print(table)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.kernels.balanced", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a directory with a model's config.json")
    parser.add_argument("--tp", type=int, nargs="+", default=(1,), help="GPUs of a worker (default: 1)")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="(default: %(default)s)")
    parser.add_argument("--matrices", nargs="+", help="names (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    arguments = parser.parse_args(argv)
    model = open_model(parser, arguments.model)
    matrices = [m for tp in arguments.tp for m in matrices_of(model, tp) if m.name in (arguments.matrices or m.name)]
    began = time.perf_counter()
    number = compile_all(matrices, arguments.tokens)
    console = Console(width=200)
    print(f"{number} kernels compiled in {time.perf_counter() - began:.1f} s", flush=True)
    limits = measure_limits()
    rates = f"{limits.matmul_rate / 1e12:.0f} TFLOP/s, {sustained_matmul_rate() / 1e12:.0f} after two seconds"
    print(f"copy {limits.copy_bandwidth / 1e12:.2f} TB/s, matmul {rates}", flush=True)
    times = Times(limits)
    figures = []
    for matrix in matrices:
        for num_tokens in arguments.tokens:
            figures.append(times.measure(matrix, num_tokens))
            f = figures[-1]
            print(
                f"{time.perf_counter() - began:.1f} s {matrix.name} {num_tokens}: floor {f.floor:.1f} library"
                f" {f.library:.1f} best {min(f.tiles.values(), default=0):.1f}",
                flush=True,
            )
            if arguments.json:
                arguments.json.write_text(json.dumps([_plain(figure) for figure in figures]) + "\n")
    show(figures, f"{arguments.model.name}, microseconds", console)
    return 0


def _plain(figure: Figure) -> dict[str, object]:
    return figure._asdict() | {
        "matrix": figure.matrix._asdict(),
        "tiles": {"/".join(map(str, tile)): us for tile, us in figure.tiles.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
