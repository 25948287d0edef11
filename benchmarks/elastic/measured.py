"""Compares the modelled cluster with measured cells of benchmarks.goodput.

Each cell is modelled with Poisson arrivals at the measured rate, for as long as the measurement, several times.
"""

import argparse
import json
import logging
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.elastic.clients import Arrival
from benchmarks.elastic.fleet import Setup
from benchmarks.elastic.load import poisson
from benchmarks.elastic.outcome import Limits, ttft_at
from benchmarks.elastic.replay import Replay, replay
from benchmarks.elastic.sizers import Fixed
from benchmarks.elastic.step_times import StepTimes, worker_of
from benchmarks.goodput_cells import Cell

LIMITS = Limits(0.5, 0.025)
SECONDS = 14.0
KINDS = {"workers": "any", "prefill": "prefill", "decode": "decode", "both": "both"}
_FLAG = re.compile(r"--(workers|prefill|decode|both) (\d+)")


def layout_of(flags: str) -> dict[str, int]:
    """Returns numbers of workers by kind from flags like "--prefill 3 --decode 1"."""
    return {KINDS[name]: int(count) for name, count in _FLAG.findall(flags)}


def model(row: Mapping[str, Any], times: StepTimes, num_runs: int) -> list[Replay]:
    cell, counts, rate = Cell.parse(row["cell"]), layout_of(row["layout"]), row["num_requests"] / SECONDS
    request = Arrival(0.0, cell.input_tokens, cell.output_tokens)
    results = []
    for seed in range(num_runs):
        arrivals = poisson([request], [(0.0, rate), (SECONDS, rate)], seed)
        setup = Setup(counts, LIMITS, seed=seed)
        results.append(replay(arrivals, times, setup, lambda _: Fixed(counts), SECONDS))
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "results", type=Path, nargs="+", help="results of benchmarks.goodput: single prompts, Llama-3.1-8B"
    )
    parser.add_argument("--runs", type=int, default=3, help="of each cell (%(default)s)")
    arguments = parser.parse_args(argv)
    for file in arguments.results:
        if not file.is_file():
            parser.error(f"{file} is no file of results")
    logging.disable(logging.WARNING)
    times = StepTimes(worker_of())
    table = Table(
        "layout", "cell", "good: measured", "model", "TTFT p50: measured", "model", title="Model and measurement"
    )
    off = []
    for file in arguments.results:
        for row in json.loads(file.read_text())["rows"]:
            results = model(row, times, arguments.runs)
            share = row["good_share"]["25"] if isinstance(row["good_share"], dict) else row["good_share"]
            good = [result.share for result in results]
            p50 = statistics.mean(ttft_at(result.requests, 50) for result in results)
            off.append(abs(statistics.mean(good) - share))
            table.add_row(
                row["layout"],
                f"{row['cell']}, {row['num_requests'] / SECONDS:.1f}/s",
                f"{share:.3f}",
                f"{min(good):.2f} to {max(good):.2f}",
                f"{row['ttft_ms']['p50']:.0f} ms",
                f"{1e3 * p50:.0f} ms",
            )
    Console(width=120).print(table)
    print(f"mean difference of good shares: {statistics.mean(off):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
