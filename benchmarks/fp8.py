"""Compares FP8 weights, and FP8 weights and pages, with bfloat16 on one GPU: three engines in one process, in turns.

Weights and prompts are random; prompts share nothing. Measures decode steps behind 1,024 tokens, and prompt tokens per
second until all first tokens, over floors (engine/floors.py) from rates of the same run.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.engine import EngineBenchmark, Result, Sizes
from benchmarks.engine_limits import measure_limits
from benchmarks.engine_loop import add_engine_arguments, build_loop, open_model

# --quantization and --kv-cache-dtype of each kind; the first is the baseline.
KINDS = {"bfloat16": ("auto", "auto"), "FP8": ("fp8", "auto"), "FP8 and pages": ("fp8", "fp8_e4m3")}
BATCHES = (1, 8, 32, 128, 256)
PREFILLS = ((8, 8192), (64, 512), (1, 512))
NUM_STEPS = 64
SIZES = Sizes(batches=BATCHES, num_steps=NUM_STEPS, prefills=PREFILLS, sweep_batches=(1,), sweep_prompts=(1,))


@dataclass(frozen=True, slots=True)
class Compared:
    name: str
    by_kind: dict[str, Result]

    def speedup(self, kind: str) -> float:
        first, other = (*self.by_kind.values(),)[0], self.by_kind[kind]
        return other.value / first.value if other.unit == "tok/s" else first.value / other.value


def compare(benchmarks: Mapping[str, EngineBenchmark], sizes: Sizes, num_turns: int) -> Iterator[Compared]:
    """Take each measure of all kinds in turns."""
    for size in sizes.batches:
        at_size = {kind: benchmark.at(batches=(size,)) for kind, benchmark in benchmarks.items()}
        yield _median([{kind: next(b.decode()) for kind, b in at_size.items()} for _ in range(num_turns)])
    for shape in sizes.prefills:
        of_shape = {kind: benchmark.at(prefills=(shape,)) for kind, benchmark in benchmarks.items()}
        yield _median([{kind: next(b.prefill()) for kind, b in of_shape.items()} for _ in range(num_turns)])


def _median(turns: Sequence[Mapping[str, Result]]) -> Compared:
    found = {
        kind: replace(first, value=statistics.median(turn[kind].value for turn in turns))
        for kind, first in turns[0].items()
    }
    return Compared(next(iter(found.values())).name, found)


def show(rows: Sequence[Compared], title: str, console: Console) -> None:
    table = Table("what", title=title)
    for kind in KINDS:
        for column in (kind, "floor", "times", "speed-up"):
            table.add_column(column, justify="right")
    for row in rows:
        cells = []
        for kind, result in row.by_kind.items():
            digits = 0 if result.unit == "tok/s" else 2
            assert result.floor is not None and result.ratio is not None
            unit = "" if result.unit == "tok/s" else " ms"
            cells += [f"{result.value:,.{digits}f}{unit}", f"{result.floor:,.{digits}f}{unit}", f"{result.ratio:.2f}"]
            cells.append(f"{row.speedup(kind):.2f}")
        table.add_row(row.name, *cells)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser)
    parser.add_argument("--turns", type=int, default=2, metavar="N", help="repetitions of each measure")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCHES, help="of decode steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    arguments = parser.parse_args(argv)
    models = {kind: open_model(parser, Path(arguments.model), how) for kind, (how, _) in KINDS.items()}
    console = Console(width=160)
    name = Path(arguments.model).name
    sizes = replace(SIZES, batches=arguments.batch_sizes)
    loops = {}
    for kind, (quantization, kv_cache_dtype) in KINDS.items():
        options = argparse.Namespace(
            **vars(arguments) | {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
        )
        loops[kind] = build_loop(options, sizes.num_tokens, sizes.max_batch_size, lambda doing: None)
        loops[kind].run([(sizes.prompt_len, 8)] * 2)
    limits = measure_limits()
    benchmarks = {
        kind: EngineBenchmark(loops[kind], models[kind], limits, sizes, kv_cache_dtype)
        for kind, (_, kv_cache_dtype) in KINDS.items()
    }
    compared = list(compare(benchmarks, sizes, arguments.turns))
    show(compared, name, console)
    console.print(f"copy {limits.copy_bandwidth / 1e12:.2f} TB/s, bfloat16 {limits.matmul_rate / 1e12:.0f} TFLOP/s")
    if arguments.json:
        steps = [asdict(row) | {"speedup": {kind: row.speedup(kind) for kind in KINDS}} for row in compared]
        arguments.json.write_text(json.dumps({"steps": steps}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
