"""Measures the share of good requests of several layouts under the same load.

Clusters start one after the other and get Poisson arrivals of each cell, PROMPTxOUTPUT@RATE. A request is good if its
TTFT is at most --ttft and the 95th percentile of its ITL at most --itl. Prints a row for each layout and cell,
and writes the same to --out as JSON.

A cell DOCUMENT+PROMPTxOUTPUTxTURNS@RATE/SET has conversations instead, each with a document of its own before the first
question. All conversations together are SET times as large as the pools of the workers that compute prompts, and every
other one has a turn between two turns of one. All first prompts are computed once before turns are measured.

  python -m benchmarks.goodput --device cuda --model DIRECTORY --load-format dummy --out results \\
    --layouts "--workers 2" "--prefill 1 --decode 1" "--both 2" --cells 4096x256@10 1024x512@20
  python -m benchmarks.goodput --device cuda --model DIRECTORY --load-format dummy --out results \\
    --layouts "--both 1" "--both 1 --store-memory 330GiB" --cells 8192+64x256x2@6/3 8192+64x256x2@4/0.8 4096x256@4.5
  python -m benchmarks.goodput --model DIRECTORY --load-format dummy --vocab-size 300 --out results \\
    --itl 100 --seconds 8 --layouts "--both 1 --num-pages 256 --max-model-len 512" \\
      "--both 1 --num-pages 256 --max-model-len 512 --store-memory 256MiB" \\
    --cells 256+24x4x4@8/0.8 256+24x4x4@8/3 280x4@6
"""

import argparse
import json
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.goodput_cells import GRACE_S, Cell, bench_config, fill_config
from benchmarks.served import Served, StartError, within
from benchmarks.steady_streams import add_model_arguments, serve_flags
from tandem.bench.clients.base import EndpointError
from tandem.bench.command import measure
from tandem.bench.goodput import Slo, goodput
from tandem.bench.measures import summarize
from tandem.client import TandemClient, TandemError, make_request

_COLUMNS = "{:<32} {:<20} {:>4} {:>11} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>6}"
_HEADINGS = (
    *("layout", "cell", "num", "good", "good/s", "TTFT_p50", "TTFT_p90", "ITL95_p50", "ITL95_p90", "tokens/s"),
    "cached",
)


def pool_tokens(address: str) -> int:
    """Return the size of all pools that prompts are computed in, in tokens."""
    with TandemClient(address) as client:
        *_, last = client.generate(make_request("Hello", max_tokens=1))
        workers = client.server_info().workers
    num_pages = sum(worker.stats.num_total_pages for worker in workers if worker.role != "decode")
    return num_pages * last.handover.page_size


def run_cell(address: str, cell: Cell, arguments: argparse.Namespace, num_pool_tokens: int) -> dict[str, Any]:
    """Return the figures of one cell. Raises EndpointError, RuntimeError, TimeoutError."""
    quiet = Console(quiet=True)
    with within(cell.seconds(num_pool_tokens, arguments.seconds) + 2 * GRACE_S, str(cell)):
        measure(bench_config(address, cell, arguments, is_warmup=True), quiet)
        config = bench_config(address, cell, arguments, is_warmup=False, pool_tokens=num_pool_tokens)
        if cell.is_conversation:
            measure(fill_config(config), quiet)
        result, run = measure(config, quiet)
    requests: Any = summarize(run.records)
    if not requests["num_whole"]:
        raise RuntimeError("no request was served whole: see the routers' logs, and --vocab-size")
    good = {
        f"{itl:g}": goodput(run.records, Slo.parse(f"ttft={arguments.ttft}ms,itl_p95={itl}ms"), requests["duration_s"])
        for itl in arguments.itl
    }
    return {
        "cell": str(cell),
        "pool_tokens": num_pool_tokens,
        "num_requests": requests["num_requests"],
        "num_whole": requests["num_whole"],
        "good_share": {itl: round(of_itl["good_share"], 4) for itl, of_itl in good.items()},
        "good_requests_per_s": {itl: round(of_itl["good_requests_per_s"], 3) for itl, of_itl in good.items()},
        "missed": {itl: of_itl["missed"] for itl, of_itl in good.items()},
        "ttft_ms": {name: round(requests["ttft"][name] * 1e3, 1) for name in ("p50", "p90", "p99")},
        "itl_p95_ms": {name: round(requests["itl_p95"][name] * 1e3, 2) for name in ("p50", "p90", "p99")},
        "output_tokens_per_s": round(requests["output_tokens_per_s"], 1),
        "cached_share": round((requests["num_cached_tokens"] or 0) / requests["num_input_tokens"], 4),
        "warnings": result["warnings"],
    }


def run_layout(
    layout: str, flags: Sequence[str], cells: Sequence[Cell], arguments: argparse.Namespace, pools: dict[str, int]
) -> list[Any]:
    """Measure all cells on one cluster; a failed cell, or a failed start, has `failed` for its figures.

    Args:
        pools: by cell: the size in tokens that its conversations are a multiple of. The first layout sets it, so that
            all layouts have the same.
    """
    logs = arguments.out / re.sub(r"\W+", "-", layout).strip("-")
    rows: list[Any] = []
    try:
        with Served([*flags, *shlex.split(layout)], logs, arguments.start_timeout) as served:
            for cell in cells:
                try:
                    if str(cell) not in pools:
                        pools[str(cell)] = pool_tokens(served.address)
                    row = run_cell(served.address, cell, arguments, pools[str(cell)])
                except (EndpointError, RuntimeError, TimeoutError, TandemError) as error:
                    row = {"cell": str(cell), "failed": str(error)}
                rows.append({"layout": layout, "ready_s": round(served.ready_s, 1), **row})
                print_row(rows[-1])
    except StartError as error:
        rows.append({"layout": layout, "cell": "", "failed": str(error)})
        print_row(rows[-1])
    return rows


def print_row(row: dict[str, Any]) -> None:
    if failed := row.get("failed"):
        print(f"{row['layout']:<32} {row['cell']:<20} failed: {failed}", flush=True)
        return
    ttft, itl = row["ttft_ms"], row["itl_p95_ms"]
    print(
        _COLUMNS.format(
            *(
                row["layout"],
                row["cell"],
                row["num_requests"],
                "/".join(f"{share:.0%}" for share in row["good_share"].values()),
                "/".join(f"{rate:.2f}" for rate in row["good_requests_per_s"].values()),
            ),
            *(ttft["p50"], ttft["p90"], itl["p50"], itl["p90"], row["output_tokens_per_s"]),
            f"{row['cached_share']:.0%}",
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
    add("--cells", nargs="+", required=True, type=Cell.parse, metavar="CELL", help="see above")
    add(
        "--seconds",
        type=float,
        default=15.0,
        metavar="S",
        help="of arrivals in each cell without conversations (%(default)s)",
    )
    add("--ttft", type=float, default=500.0, metavar="MS", help="limit of a good request's TTFT (%(default)s)")
    add("--itl", nargs="+", type=float, default=[25.0], metavar="MS", help="limits of the 95th percentile of its ITL")
    add("--processes", type=int, default=2, metavar="N", help="client processes (%(default)s)")
    add("--start-timeout", type=float, default=150.0, metavar="S", help="of a cluster (%(default)s)")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    print(_COLUMNS.format(*_HEADINGS), flush=True)
    rows: list[Any] = []
    pools: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as directory:
        flags = serve_flags(arguments, Path(directory))
        for layout in arguments.layouts:
            rows += run_layout(layout, flags, arguments.cells, arguments, pools)
            results = {"began": began, "argv": argv or sys.argv[1:], "rows": rows}
            (arguments.out / "goodput.json").write_text(json.dumps(results, indent=1) + "\n")
    is_whole = all(not row.get("failed") and row["num_whole"] == row["num_requests"] for row in rows)
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
