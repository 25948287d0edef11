"""Measures handovers, and the effect of arriving prompts on running streams, on one cluster, cell by cell.

A cell is a load of `tandem bench`: prompts alone (lone, long-32k), prompts arriving beside running streams (steady-3,
steady-6), or 64 prompts of 256 tokens at once (burst-64x256). Each cell writes NAME.json (figures, percentiles of
phases and clients' measures), NAME.jsonl (requests) and NAME.txt (tables); summary.json has all figures. On a CPU the
loads are much smaller, and the aims do not apply.

  python -m benchmarks.interference --out results --cells lone steady-3 -- --chunk-size 4096
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.interference_cells import (
    CLIENT_TTFT,
    DEFAULTS,
    Cell,
    Distribution,
    Sizes,
    bench_configs,
    distributions,
    num_not_whole,
    rows_of,
)
from benchmarks.rows import Row, row_json, table_of
from benchmarks.served import Served, StartError, within
from benchmarks.steady_streams import RUN_GRACE_S, add_model_arguments, serve_flags
from tandem.bench.clients.base import EndpointError
from tandem.bench.command import measure
from tandem.bench.records import RequestRecord
from tandem.bench.results import write_records
from tandem.deploy.cli.serve_config import cluster_config
from tandem.deploy.cli.serve_options import add_serve_options
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.models.config import ModelConfig
from tandem.engine.page_layout import page_layout_of
from tandem.engine.weights.resolve import resolve_model

# The aim for a plain copy in benchmarks.kv_transfer.
COPY_GB_PER_S = 375.0
QUIET = Console(quiet=True)
# Above all cells' seeds.
WARMUP_SEED = 1001
SUFFIXES = (".json", ".jsonl", ".txt")
SHOWN = ("p50", "p90", "p99", "max")


def layout_of(flags: Sequence[str]) -> PageLayout:
    """Return the page layout for these flags of `tandem serve`. Raises ValueError."""
    parser = argparse.ArgumentParser(prog="tandem serve", allow_abbrev=False)
    add_serve_options(parser)
    config = cluster_config(parser.parse_args(flags), {})
    directory = resolve_model(config.model, config.load_format)
    engine = config.engine(str(directory))
    return page_layout_of(ModelConfig.from_dir(directory), engine.page_size, engine.dtype, engine.kv_cache_dtype)


def own_copy_ms(layout: PageLayout, num_tokens: int, gb_per_s: float) -> float:
    """Return the milliseconds to copy one prompt's pages at the link's plain rate."""
    return layout.num_pages_for(num_tokens) * layout.page_bytes / (gb_per_s * 1e9) * 1e3


def warm_up(address: str, sizes: Sizes, cells: Sequence[Cell], vocab_size: int) -> None:
    """Send a few prompts of each length, so that no run compiles, allocates or connects."""
    by_length = {cell.input_tokens: cell for cell in reversed(cells)}
    for number, cell in enumerate(by_length.values()):
        num_prompts = 4 if cell.kind == "alone" else max(4, (cell.num_prompts or sizes.num_streams) // 4)
        few = replace(cell, kind="burst", num_prompts=num_prompts, num_runs=1)
        for config in bench_configs(few, sizes, address, vocab_size, RUN_GRACE_S, WARMUP_SEED + number):
            measure(config, QUIET)


def run_cell(
    cell: Cell, sizes: Sizes, address: str, vocab_size: int, timeout_s: float
) -> tuple[list[dict[str, Any]], list[RequestRecord]]:
    """Raises TimeoutError, EndpointError, RuntimeError."""
    request_timeout_s = (sizes.lead_s + sizes.seconds if cell.kind == "steady" else 0.0) + 2 * RUN_GRACE_S
    configs = bench_configs(cell, sizes, address, vocab_size, request_timeout_s)
    results, records = [], []
    with within(timeout_s, cell.name):
        for config in configs:
            result, run = measure(config, QUIET)
            if not result["is_whole"]:
                raise KeyboardInterrupt
            results.append(result)
            records += run.records
    return results, records


def phases_table(found: Mapping[str, Distribution], title: str) -> Table:
    table = Table("what, in ms", title=title)
    for column in ("number", *SHOWN):
        table.add_column(column, justify="right")
    for name, values in found.items():
        table.add_row(name, f"{values['count']:,}", *(f"{values[what]:,.2f}" for what in SHOWN))
    return table


def write_cell(
    cell: Cell,
    rows: Sequence[Row],
    found: Mapping[str, Distribution],
    more: Mapping[str, Any],
    out: Path,
    results: Sequence[dict[str, Any]],
    records: Sequence[RequestRecord],
) -> None:
    whole = {
        "cell": asdict(cell),
        "rows": [row_json(row) for row in rows],
        "ms": {name: without_curves(values) for name, values in found.items()},
        **more,
        "results": [without_curves(result) for result in results],
    }
    (out / f"{cell.name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    write_records(records, out / f"{cell.name}.jsonl")
    table = table_of(rows, f"{cell.name}: {cell.what}")
    with (out / f"{cell.name}.txt").open("w") as file:
        console = Console(file=file, width=120)
        console.print(table)
        console.print(phases_table(found, cell.name))
    Console().print(table)


def without_curves(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: without_curves(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if name not in ("curve", "series", "config")
    }


def remove_results(out: Path, cells: Sequence[Cell]) -> None:
    """Remove an earlier run's files, so that a failed cell leaves none."""
    for cell in cells:
        for suffix in SUFFIXES:
            (out / f"{cell.name}{suffix}").unlink(missing_ok=True)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    add: Any = parser.add_argument
    names = DEFAULTS["cuda"].names
    add("--prefill", type=int, default=1, metavar="N", help="prefill workers (%(default)s)")
    add("--decode", type=int, default=1, metavar="N", help="decode workers (%(default)s)")
    add("--cells", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)} (all)")
    add("--seconds", type=float, metavar="S", help="of arrivals beside streams (20; on a CPU 4)")
    add("--streams", type=int, metavar="N", help="running streams (64; 2)")
    add("--copy-gb-per-s", type=float, default=COPY_GB_PER_S, metavar="N", help="plain rate of the link (%(default)s)")
    add("--limit", type=float, default=400.0, metavar="S", help="time limit in seconds (%(default)s)")
    given = list(argv)
    place = given.index("--") if "--" in given else len(given)
    arguments = parser.parse_args(given[:place])
    arguments.serve = given[place + 1 :]
    return arguments


def measure_cells(
    cells: Sequence[Cell],
    sizes: Sizes,
    arguments: argparse.Namespace,
    address: str,
    layout: PageLayout,
    deadline: float,
    summary: dict[str, Any],
) -> None:
    """Measure cells until `deadline` on the monotonic clock; update the summary after each."""
    lone_ttft_ms: float | None = None
    for cell in cells:
        left_s, expected_s = deadline - time.monotonic(), expected_seconds(cell, sizes)
        told: dict[str, Any]
        if left_s < expected_s:
            told = {"left_out": f"it takes about {expected_s:.0f} s, but {max(0.0, left_s):.0f} s are left"}
        else:
            timeout_s = min(left_s, expected_s + 2 * RUN_GRACE_S)
            try:
                results, records = run_cell(cell, sizes, address, arguments.vocab_size, timeout_s)
                warnings = []
                if cell.kind == "steady" and lone_ttft_ms is None:
                    warnings.append("no TTFT ratio: `lone` was not measured before")
                found = distributions(records)
                copy_ms = own_copy_ms(layout, cell.input_tokens, arguments.copy_gb_per_s)
                rows = rows_of(cell, records, found, copy_ms, lone_ttft_ms)
                told = described(records, results, rows, warnings)
                write_cell(cell, rows, found, told, arguments.out, results, records)
                if cell.name == "lone" and CLIENT_TTFT in found:
                    lone_ttft_ms = found[CLIENT_TTFT]["p50"]
            except (EndpointError, TimeoutError, RuntimeError, OSError) as error:
                told = {"failed": str(error)}
        for problem in problems(told):
            print(f"{cell.name}: {problem}", file=sys.stderr)
        summary["cells"][cell.name] = told
        write_summary(summary, arguments.out)


def described(
    records: Sequence[RequestRecord], results: Sequence[dict[str, Any]], rows: Sequence[Row], warnings: Sequence[str]
) -> dict[str, Any]:
    """Returns a measured cell's part of the summary. Args: warnings: in addition to those of its runs."""
    return {
        "num_requests": len(records),
        "num_not_whole": num_not_whole(records),
        "errors": {record.error: record.detail for record in records if record.error not in ("", "cut")},
        "warnings": [*(warning for result in results for warning in result["warnings"]), *warnings],
        "rows": [row_json(row) for row in rows],
    }


def problems(told: Mapping[str, Any]) -> list[str]:
    """Problems of a cell in the summary, in words."""
    ended = [f"{how.replace('_', ' ')}: {told[how]}" for how in ("left_out", "failed") if how in told]
    errors = [f"{kind}: {detail}" for kind, detail in told.get("errors", {}).items()]
    return [*ended, *errors, *told.get("warnings", ())]


def write_summary(summary: Mapping[str, Any], out: Path) -> None:
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def expected_seconds(cell: Cell, sizes: Sizes) -> float:
    return cell.expected_s + (sizes.lead_s + sizes.seconds if cell.kind == "steady" else 0.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if all cells were measured and every request has a whole answer, 1 otherwise."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parse_arguments(given)
    chosen = {"seconds": arguments.seconds, "num_streams": arguments.streams}
    sizes = replace(DEFAULTS[arguments.device], **{name: value for name, value in chosen.items() if value is not None})
    cells = [cell for cell in sizes.cells if cell.name in arguments.cells]
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    remove_results(out, cells)
    deadline = time.monotonic() + arguments.limit
    summary: dict[str, Any] = {"began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "argv": given, "cells": {}}
    try:
        with tempfile.TemporaryDirectory() as directory:
            flags = [
                *serve_flags(arguments, Path(directory)),
                *("--prefill", str(arguments.prefill), "--decode", str(arguments.decode)),
                *arguments.serve,
            ]
            layout = layout_of(flags)
            with Served(flags, out / "logs", min(sizes.start_timeout_s, arguments.limit)) as served:
                summary["start_to_ready_s"] = round(served.ready_s, 1)
                with within(min(2 * RUN_GRACE_S, deadline - time.monotonic()), "warming up"):
                    warm_up(served.address, sizes, cells, arguments.vocab_size)
                measure_cells(cells, sizes, arguments, served.address, layout, deadline, summary)
                (out / "serve.txt").write_text("\n".join(served.lines) + "\n")
    except (StartError, EndpointError, TimeoutError, RuntimeError, ValueError) as error:
        summary["failed"] = str(error)
        print(f"failed: {error}", file=sys.stderr)
    write_summary(summary, out)
    measured = summary["cells"]
    is_whole = "failed" not in summary and all(
        cell.name in measured and not measured[cell.name].get("num_not_whole", 1) for cell in cells
    )
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
