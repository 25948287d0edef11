"""Four classical experiments of serving with prefill and decode apart, and a report of what they say on this machine.

1. Fifty prompts at once beside streams that are running: role both against a prefill and a decode worker on as many
   devices, and chunked against whole prefill.
2. One request at a time against eight: latencies, throughput, and where the time goes.
3. The radix caches: cold, warm, eight with one prefix at once, and after all has been pushed out.
4. Start and memory, stage by stage and part by part.

Clusters are those of `tandem serve`, the load is that of `tandem bench`. Five of them start
one after the other, which is a good part of the minutes that all of it takes:

  python -m benchmarks.reproduce_lab --out docs/reports/cpu
  python -m benchmarks.reproduce_lab --device cuda --model DIRECTORY --load-format dummy --out results --measure-only
  python -m benchmarks.reproduce_lab --from results/results.json --out docs/reports/h200
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.lab.machine import current_load, describe_machine, describe_versions
from benchmarks.lab.measuring import Lab
from benchmarks.lab.sizes import DEFAULTS, PAGE_SIZE, Sizes
from benchmarks.steady_streams import add_model_arguments, serve_flags
from tandem.bench.plots import require_matplotlib

RESULTS = "results.json"
REPORT = "README.md"


def measure_lab(arguments: argparse.Namespace, sizes: Sizes, command: str) -> dict[str, Any]:
    """Runs all experiments; what was measured is in the file of results after each cluster, too."""
    began = time.monotonic()
    about: dict[str, Any] = {
        "command": command,
        "began": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "device": arguments.device,
        "model": Path(arguments.model).name,
        "load_format": arguments.load_format,
        "threads": arguments.threads,
        "sizes": asdict(sizes),
        "page_size": PAGE_SIZE,
    }
    with tempfile.TemporaryDirectory() as directory:
        flags = serve_flags(arguments, Path(directory))
        lab = Lab(flags, sizes, arguments.vocab_size, Path(directory), began + arguments.limit)

        def on_progress(what: str) -> None:
            seconds = time.monotonic() - began
            print(f"{seconds:6.1f} s  {what}", flush=True)
            results = {**about, "seconds": round(seconds, 1), **lab.results}
            write_results(results, arguments.out / RESULTS)

        lab.run(on_progress)
        about["machine"]["load at the end"] = current_load()
        on_progress("measured")
    return read_results(arguments.out / RESULTS)


def write_results(results: dict[str, Any], file: Path) -> None:
    """With times to the microsecond. Raises OSError."""
    file.write_text(json.dumps(_rounded(results), separators=(",", ":")) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return round(value, 6) if isinstance(value, float) else value


def read_results(file: Path) -> dict[str, Any]:
    """Raises ValueError if it is not what this program writes, OSError."""
    results = json.loads(file.read_text())
    if not isinstance(results, dict) or not {"burst", "concurrency", "cache", "starts"} <= results.keys():
        raise ValueError(f"{file} is not what `python -m benchmarks.reproduce_lab` writes")
    return results


def make_report(results: dict[str, Any], out: Path) -> None:
    """Writes plots, report and, where the results came from elsewhere, these too. Raises OSError."""
    # matplotlib is not needed where only measuring is done.
    from benchmarks.lab.figures import write_figures
    from benchmarks.lab.report import write_report

    write_results(results, out / RESULTS)
    (out / REPORT).write_text(write_report(results, write_figures(results, out), RESULTS))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every experiment has its figures, 1 otherwise."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    add: Any = parser.add_argument
    add("--limit", type=float, default=290.0, metavar="S", help="seconds that measuring may take (%(default)s)")
    add("--measure-only", action="store_true", help=f"write {RESULTS} and no report: needs no matplotlib")
    add("--from", dest="source", type=Path, metavar="FILE", help="measure nothing, and report what this file has")
    add("--burst", type=int, metavar="N", help="prompts that come at once (50)")
    add("--lead", type=float, metavar="S", help="seconds that streams run before (2)")
    arguments = parser.parse_args(argv)
    if not arguments.measure_only:
        try:
            require_matplotlib()
        except ValueError as error:
            parser.error(f"{error}, or --measure-only")
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.source is not None:
        results = read_results(arguments.source)
    else:
        given = {"num_burst": arguments.burst, "lead_s": arguments.lead}
        chosen = {name: value for name, value in given.items() if value is not None}
        sizes = replace(DEFAULTS[arguments.device], **chosen)
        results = measure_lab(arguments, sizes, shlex.join(["python", "-m", "benchmarks.reproduce_lab", *argv]))
    if not arguments.measure_only:
        make_report(results, arguments.out)
        print(f"The report is {arguments.out / REPORT}")
    for name, failure in results["failures"].items():
        print(f"{name}: {failure}", file=sys.stderr)
    return 1 if results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
