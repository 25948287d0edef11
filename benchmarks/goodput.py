"""Measures the share of good requests of several layouts under the same load.

Clusters start one after the other and get Poisson arrivals of each cell, PROMPTxOUTPUT@RATE. A request is good if its
TTFT is at most --ttft and the 95th percentile of its ITL at most --itl. Prints a row for each layout and cell,
and writes the same to --out as JSON.

  python -m benchmarks.goodput --device cuda --model DIRECTORY --load-format dummy --out results \\
    --layouts "--workers 2" "--prefill 1 --decode 1" "--both 2" --cells 4096x256@10 1024x512@20
"""

import argparse
import json
import re
import shlex
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.served import Served, StartError, within
from benchmarks.steady_streams import add_model_arguments, serve_flags
from tandem.bench.arrivals import ArrivalConfig
from tandem.bench.clients.base import EndpointConfig, EndpointError
from tandem.bench.command import measure
from tandem.bench.config import BenchConfig, WorkloadConfig
from tandem.bench.goodput import Slo, goodput
from tandem.bench.workloads.synthetic import Lengths

_CELL = re.compile(r"(\d+)x(\d+)@(\d+(?:\.\d+)?)")
_WARMUP_PROMPTS = 8
_GRACE_S = 90.0
_COLUMNS = "{:<32} {:<16} {:>4} {:>11} {:>9} {:>9} {:>9} {:>9} {:>9}"
_HEADINGS = ("layout", "cell", "num", "good", "TTFT_p50", "TTFT_p90", "ITL95_p50", "ITL95_p90", "tokens/s")


@dataclass(frozen=True, slots=True)
class Cell:
    """Attributes: rate: requests per second."""

    input_tokens: int
    output_tokens: int
    rate: float

    @classmethod
    def parse(cls, text: str) -> "Cell":
        """Parse "4096x256@10". Raises ValueError."""
        if (found := _CELL.fullmatch(text)) is None or float(found[3]) == 0:
            raise ValueError(f"a cell is PROMPTxOUTPUT@RATE, such as 4096x256@10, not {text!r}")
        return cls(int(found[1]), int(found[2]), float(found[3]))

    def __str__(self) -> str:
        return f"{self.input_tokens}x{self.output_tokens}@{self.rate:g}"


def bench_config(address: str, cell: Cell, arguments: argparse.Namespace, is_warmup: bool) -> BenchConfig:
    return BenchConfig(
        EndpointConfig(f"grpc://{address}", timeout_s=arguments.seconds + _GRACE_S),
        WorkloadConfig(
            "synthetic",
            num_requests=_WARMUP_PROMPTS if is_warmup else None,
            input_lengths=Lengths(cell.input_tokens, cell.input_tokens),
            output_lengths=Lengths(cell.output_tokens, cell.output_tokens),
            vocab_size=arguments.vocab_size,
            # No prompt may be cached from another cell or the warm-up; layouts get equal prompts.
            seed=zlib.crc32(f"{cell} {is_warmup}".encode()),
        ),
        ArrivalConfig("closed", concurrency=_WARMUP_PROMPTS) if is_warmup else ArrivalConfig("poisson", cell.rate),
        duration_s=None if is_warmup else arguments.seconds,
        num_processes=1 if is_warmup else arguments.processes,
        label=str(cell),
    )


def run_cell(address: str, cell: Cell, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one cell. Raises EndpointError, RuntimeError, TimeoutError."""
    quiet = Console(quiet=True)
    with within(arguments.seconds + 2 * _GRACE_S, str(cell)):
        measure(bench_config(address, cell, arguments, is_warmup=True), quiet)
        result, run = measure(bench_config(address, cell, arguments, is_warmup=False), quiet)
    requests = result["requests"]
    good = {
        f"{itl:g}": goodput(run.records, Slo.parse(f"ttft={arguments.ttft}ms,itl_p95={itl}ms"), requests["duration_s"])
        for itl in arguments.itl
    }
    return {
        "cell": str(cell),
        "num_requests": requests["num_requests"],
        "num_whole": requests["num_whole"],
        "good_share": {itl: round(of_itl["good_share"], 4) for itl, of_itl in good.items()},
        "missed": {itl: of_itl["missed"] for itl, of_itl in good.items()},
        "ttft_ms": {name: round(requests["ttft"][name] * 1e3, 1) for name in ("p50", "p90", "p99")},
        "itl_p95_ms": {name: round(requests["itl_p95"][name] * 1e3, 2) for name in ("p50", "p90", "p99")},
        "output_tokens_per_s": round(requests["output_tokens_per_s"], 1),
        "warnings": result["warnings"],
    }


def run_layout(layout: str, flags: Sequence[str], cells: Sequence[Cell], arguments: argparse.Namespace) -> list[Any]:
    """Measure all cells on one cluster; a failed cell, or a failed start, has `failed` for its figures."""
    logs = arguments.out / re.sub(r"\W+", "-", layout).strip("-")
    rows: list[Any] = []
    try:
        with Served([*flags, *shlex.split(layout)], logs, arguments.start_timeout) as served:
            for cell in cells:
                try:
                    row = run_cell(served.address, cell, arguments)
                except (EndpointError, RuntimeError, TimeoutError) as error:
                    row = {"cell": str(cell), "failed": str(error)}
                rows.append({"layout": layout, "ready_s": round(served.ready_s, 1), **row})
                print_row(rows[-1])
    except StartError as error:
        rows.append({"layout": layout, "cell": "", "failed": str(error)})
        print_row(rows[-1])
    return rows


def print_row(row: dict[str, Any]) -> None:
    if failed := row.get("failed"):
        print(f"{row['layout']:<32} {row['cell']:<16} failed: {failed}", flush=True)
        return
    ttft, itl = row["ttft_ms"], row["itl_p95_ms"]
    print(
        _COLUMNS.format(
            *(
                row["layout"],
                row["cell"],
                row["num_requests"],
                "/".join(f"{s:.0%}" for s in row["good_share"].values()),
            ),
            *(ttft["p50"], ttft["p90"], itl["p50"], itl["p90"], row["output_tokens_per_s"]),
        ),
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    add: Any = parser.add_argument
    add(
        "--layouts", nargs="+", required=True, metavar="FLAGS", help="flags of `tandem serve`, in one argument a layout"
    )
    add("--cells", nargs="+", required=True, type=Cell.parse, metavar="CELL", help="PROMPTxOUTPUT@RATE")
    add("--seconds", type=float, default=15.0, metavar="S", help="of arrivals in each cell (%(default)s)")
    add("--ttft", type=float, default=500.0, metavar="MS", help="limit of a good request's TTFT (%(default)s)")
    add("--itl", nargs="+", type=float, default=[25.0], metavar="MS", help="limits of the 95th percentile of its ITL")
    add("--processes", type=int, default=2, metavar="N", help="client processes (%(default)s)")
    add("--start-timeout", type=float, default=150.0, metavar="S", help="of a cluster (%(default)s)")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    print(_COLUMNS.format(*_HEADINGS), flush=True)
    rows: list[Any] = []
    with tempfile.TemporaryDirectory() as directory:
        flags = serve_flags(arguments, Path(directory))
        for layout in arguments.layouts:
            rows += run_layout(layout, flags, arguments.cells, arguments)
            results = {"began": began, "argv": argv or sys.argv[1:], "rows": rows}
            (arguments.out / "goodput.json").write_text(json.dumps(results, indent=1) + "\n")
    is_whole = all(not row.get("failed") and row["num_whole"] == row["num_requests"] for row in rows)
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
