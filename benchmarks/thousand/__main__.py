"""Measures what breaks first with up to 1,000 workers and 16 routers, in virtual time.

Real routers, policies, planner and worker-side streams; scripted workers. All routers run in one thread, and the first
one's CPU time counts: with its codecs, without gRPC, tokenizing and clients. Requests have 1,000 prompt and 32 output
tokens and come at a rate in proportion to the workers.
"""

import argparse
import json
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.thousand.measures import Measure, run

# Whether workers are those of `--workers`.
LAYOUTS = {"prefill-decode": False, "both": True}


def table_of(title: str, columns: Sequence[str], results: Sequence[Sequence[Measure]]) -> Table:
    table = Table("what", "unit", title=title)
    for column in columns:
        table.add_column(column, justify="right")
    for row in zip(*results, strict=True):
        table.add_row(
            row[0].name, row[0].unit, *(f"{one.value:,.3g}" if one.value < 1e3 else f"{one.value:,.0f}" for one in row)
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 300, 1000], help="sizes (%(default)s)")
    parser.add_argument("--routers", type=int, nargs="+", default=[1, 4, 16], help="of each size (%(default)s)")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="of the workers")
    parser.add_argument("--routing", default="least_cost", help="policy (%(default)s)")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second and worker (%(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="virtual time under load (%(default)s)")
    args = parser.parse_args(argv)
    cells = [(workers, routers) for workers in args.workers for routers in args.routers]
    written = {}
    for layout in args.layouts:
        columns, results = [], []
        for workers, routers in cells:
            # A process of its own returns its memory.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                results.append(
                    pool.apply(run, (workers, routers, LAYOUTS[layout], args.routing, args.rate, args.seconds))
                )
            columns.append(f"{workers} x {routers}")
            print(f"{layout}, {columns[-1]}: done", file=sys.stderr, flush=True)
        Console(width=200).print(table_of(f"{layout}, {args.routing}: workers x routers", columns, results))
        written[layout] = {
            column: {f"{one.name} ({one.unit})": one.value for one in result}
            for column, result in zip(columns, results, strict=True)
        }
    if args.json:
        args.json.write_text(json.dumps(written, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
