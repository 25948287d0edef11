"""Measures the start of `tandem serve`, part by part.

Starts and stops a cluster several times and prints when each part was over. The first run is separate, because it reads
from disk and may compile. All other options are those of `tandem serve`; dummy weights need only a config.json:

  python -m benchmarks.start_up --runs 5 --device cuda --model DIRECTORY --load-format dummy --prefill 1 --decode 1
"""

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.router_model import fit_to_serve
from benchmarks.served import Served, StartError

# In order. A worker may skip some, or pass them unseen.
STAGES = (
    "starting",
    "importing",
    "loading weights",
    "fingerprinting weights",
    "compiling kernels",
    "warming up",
    "allocating pages",
    "capturing graphs",
    "loaded",
    "ready",
)
# Rows, and the last stage that must be over in every worker.
WORKER_ROWS = (
    ("workers run", "starting"),
    ("workers have imported", "importing"),
    ("weights are there", "fingerprinting weights"),
    ("kernels are compiled", "compiling kernels"),
    ("warmed up", "warming up"),
    ("graphs captured, ports open", "capturing graphs"),
)
_LINE = re.compile(r" *(?P<seconds>\d+\.\d) s  (?P<parts>.+)")
_PART = re.compile(r"(?P<name>[a-z0-9-]+): (?P<doing>[^(,]+)(?: \([^)]*\))?")
_READY = re.compile(r"Ready after (?P<seconds>[\d.]+) s")
_IS_WORKER = re.compile(r"(prefill|decode|both)-\d+")


def until(lines: Sequence[str]) -> dict[str, float]:
    """Return seconds from the start to the end of each part, from the command's output."""
    began: dict[str, dict[str, float]] = {}
    ready = None
    for line in lines:
        if match := _READY.fullmatch(line):
            ready = float(match["seconds"])
        elif match := _LINE.fullmatch(line):
            for part in _PART.finditer(match["parts"]):
                # Long stages are printed repeatedly.
                began.setdefault(part["name"], {}).setdefault(part["doing"].strip(), float(match["seconds"]))
    workers = [stages for name, stages in began.items() if _IS_WORKER.fullmatch(name)]
    routers = [stages["ready"] for name, stages in began.items() if name.startswith("router-")]
    rows = {"Ray is up": began["ray"]["ready"]}
    rows |= {row: max(_over(stages, last) for stages in workers) for row, last in WORKER_ROWS}
    assert ready is not None
    return rows | {"routers serve": max(routers), "ready": ready}


def _over(stages: dict[str, float], last: str) -> float:
    behind = STAGES[STAGES.index(last) + 1 :]
    return min(seconds for stage, seconds in stages.items() if stage in behind)


def summary(runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    later = runs[1:] or runs
    return {
        row: {"first": runs[0][row], "median_of_later": round(statistics.median(run[row] for run in later), 2)}
        for row in runs[0]
    }


def print_table(runs: Sequence[dict[str, float]], console: Console) -> None:
    table = Table("seconds until", "first run", *(f"run {i + 2}" for i in range(len(runs) - 1)), "median of later runs")
    for row, figures in summary(runs).items():
        table.add_row(row, *(f"{run[row]:.1f}" for run in runs), f"{figures['median_of_later']:.1f}")
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="starts (%(default)s)")
    parser.add_argument("--model", required=True, help="as of `tandem serve`")
    parser.add_argument("--out", type=Path, metavar="FILE", help="for the figures, as JSON")
    parser.add_argument(
        "--limit", type=float, default=120.0, metavar="S", help="time limit of a start in seconds (%(default)s)"
    )
    arguments, serve_flags = parser.parse_known_args(argv)
    if arguments.runs < 1:
        parser.error("--runs must be at least 1")
    runs = []
    with tempfile.TemporaryDirectory() as directory:
        flags = ["--model", fit_to_serve(arguments.model, Path(directory)), *serve_flags]
        for number in range(arguments.runs):
            try:
                with Served(flags, Path(directory) / f"logs-{number}", arguments.limit) as served:
                    began_stop = time.monotonic()
            except StartError as error:
                print(error, file=sys.stderr)
                return 1
            runs.append(until(served.lines) | {"stopped, from then on": round(time.monotonic() - began_stop, 1)})
    print(f"{len(os.sched_getaffinity(0))} CPUs, load {os.getloadavg()[0]:.1f}: tandem serve {' '.join(serve_flags)}")
    print_table(runs, Console())
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"flags": serve_flags, "runs": runs, "summary": summary(runs)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
