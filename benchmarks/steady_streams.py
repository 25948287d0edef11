"""Measures the effect of long prompts on running streams, for several layouts of the same devices.

On two devices: two workers of role both, or a prefill and a decode worker. On one device: a worker of role both with
mixed steps (mixed), with pieces of prompts between decode steps (pieces), or with whole chunks between them (chunks).
Clusters start one after the other (--layouts) and get the same load of `tandem bench`: running streams, and prompts
that arrive at a rate or, with --burst, all at once. Each layout writes NAME.json (result), NAME.jsonl (requests) and
NAME.txt (tables); summary.json has the headline figures.

  python -m benchmarks.steady_streams --device cuda --model DIRECTORY --load-format dummy --out results
  tandem bench plot results/both.json results/1p1d.json --out itl.png
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.router_model import fit_to_serve
from benchmarks.served import Served, StartError, within
from tandem.bench.arrivals import ArrivalConfig
from tandem.bench.clients.base import EndpointConfig, EndpointError
from tandem.bench.command import measure
from tandem.bench.config import BenchConfig, WorkloadConfig
from tandem.bench.results import write_records, write_result
from tandem.bench.terminal import print_result
from tandem.bench.workloads.synthetic import Lengths

# By file name: the label in pictures, and flags of `tandem serve`.
LAYOUTS = {
    "both": ("two workers of role both", ("--both", "2")),
    "1p1d": ("a prefill and a decode worker", ("--prefill", "1", "--decode", "1")),
    "mixed": ("one worker of role both, mixed steps", ("--both", "1", "--mixed-steps", "on")),
    "pieces": ("one worker of role both, pieces", ("--both", "1", "--mixed-steps", "off")),
    "chunks": (
        "one worker of role both, whole chunks",
        ("--both", "1", "--mixed-steps", "off", "--itl-objective", "1000000"),
    ),
}
DEFAULT_LAYOUTS = "both", "1p1d"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Attributes: seconds: of the arrivals; lead_s: of the streams before; num_burst: 0: none."""

    num_streams: int
    stream_tokens: int
    input_tokens: int
    output_tokens: int
    rate: float
    seconds: float
    lead_s: float
    warmup_prompts: int
    start_timeout_s: float
    num_burst: int = 0


DEFAULTS = {
    "cuda": Sizes(64, 8192, 4096, 64, 3.0, 30.0, 3.0, 8, 75.0),
    "cpu": Sizes(4, 512, 256, 8, 0.3, 30.0, 3.0, 2, 120.0),
}
RUN_GRACE_S = 30.0


def bench_config(address: str, label: str, sizes: Sizes, vocab_size: int) -> BenchConfig:
    arrivals = ArrivalConfig("poisson", sizes.rate)
    if sizes.num_burst:
        arrivals = ArrivalConfig("burst", rate=sizes.num_burst, burst_size=sizes.num_burst)
    return BenchConfig(
        EndpointConfig(f"grpc://{address}", timeout_s=sizes.lead_s + sizes.seconds + RUN_GRACE_S),
        WorkloadConfig(
            "steady-streams",
            num_requests=sizes.num_burst or None,
            input_lengths=Lengths(sizes.input_tokens, sizes.input_tokens),
            output_lengths=Lengths(sizes.output_tokens, sizes.output_tokens),
            num_streams=sizes.num_streams,
            stream_output_tokens=sizes.stream_tokens,
            lead_s=sizes.lead_s,
            vocab_size=vocab_size,
        ),
        arrivals,
        duration_s=None if sizes.num_burst else sizes.lead_s + sizes.seconds,
        label=label,
    )


def warmup_config(address: str, sizes: Sizes, vocab_size: int) -> BenchConfig:
    """Return other prompts, so that the measured run does not compile, allocate or connect."""
    config = bench_config(address, "warming up", sizes, vocab_size)
    workload = replace(config.workload, kind="synthetic", num_requests=sizes.warmup_prompts, seed=1)
    arrivals = ArrivalConfig("closed", concurrency=max(1, sizes.warmup_prompts // 2))
    return replace(config, workload=workload, arrivals=arrivals, duration_s=None)


def run_layout(
    name: str, label: str, flags: Sequence[str], sizes: Sizes, vocab_size: int, out: Path, deadline: float
) -> dict[str, Any]:
    """Measure one cluster and write the results. Raises StartError, TimeoutError, EndpointError, RuntimeError."""
    quiet = Console(quiet=True)
    with (
        Served(flags, out / f"{name}-logs", min(sizes.start_timeout_s, deadline - time.monotonic())) as served,
        within(deadline - time.monotonic(), label),
    ):
        with within(60 + RUN_GRACE_S, f"warming up {label}"):
            measure(warmup_config(served.address, sizes, vocab_size), quiet)
        with within(sizes.lead_s + sizes.seconds + 2 * RUN_GRACE_S, label):
            result, run = measure(bench_config(served.address, label, sizes, vocab_size), quiet)
    (out / f"{name}-serve.txt").write_text("\n".join(served.lines) + "\n")
    write_result(result, out / f"{name}.json")
    write_records(run.records, out / f"{name}.jsonl")
    with (out / f"{name}.txt").open("w") as file:
        print_result(Console(file=file, width=120), result)
    return headline(result, served.ready_s)


def remove_results(out: Path) -> None:
    """Remove an earlier run's files, so that a failed layout leaves none."""
    for name in LAYOUTS:
        for suffix in (".json", ".jsonl", ".txt", "-serve.txt"):
            (out / f"{name}{suffix}").unlink(missing_ok=True)


def headline(result: dict[str, Any], ready_s: float) -> dict[str, Any]:
    def ms(of: dict[str, Any] | None, *names: str) -> dict[str, float | None]:
        return {name: None if of is None else round(of[name] * 1e3, 2) for name in names}

    streams, requests = result["streams"], result["requests"]
    return {
        "label": result["label"],
        "start_to_ready_s": round(ready_s, 1),
        "itl_of_streams_ms": ms(streams["itl"], "p50", "p90", "p95", "p99", "max"),
        "ttft_of_prompts_ms": ms(requests["ttft"], "p50", "p90", "p99", "max"),
        "num_prompts": requests["num_requests"],
        "num_whole": requests["num_whole"],
        "errors": {**requests["errors"], **streams["errors"]},
        "stream_tokens_per_s": round(streams["output_tokens_per_s"], 1),
        "warnings": result["warnings"],
    }


def serve_flags(arguments: argparse.Namespace, directory: Path) -> list[str]:
    threads = ["--threads", str(arguments.threads)] if arguments.threads else []
    model = fit_to_serve(arguments.model, directory)
    return ["--model", model, "--device", arguments.device, "--load-format", arguments.load_format, *threads]


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add: Any = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIRECTORY", help="for the results")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    add("--model", default="smollm2-135m-instruct", help="as in `tandem serve`; dummy weights need only config.json")
    add("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights (default: auto)")
    add("--vocab-size", type=int, default=8000, metavar="N", help="bound of the prompts' token ids (%(default)s)")
    add("--threads", type=int, default=0, metavar="N", help="per CPU worker (default: an even share)")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    add: Any = parser.add_argument
    add("--layouts", nargs="+", choices=LAYOUTS, default=DEFAULT_LAYOUTS, help="in this order (%(default)s)")
    add("--streams", type=int, metavar="N", help="running streams (64; on a CPU 4)")
    add("--input-tokens", type=int, metavar="N", help="of each arriving prompt (4096; 256)")
    add("--output-tokens", type=int, metavar="N", help="of each arriving prompt (64; 8)")
    add("--rate", type=float, metavar="N", help="prompts per second (3; 0.3)")
    add("--seconds", type=float, metavar="S", help="duration of the arrivals (30)")
    add("--burst", type=int, metavar="N", help="N prompts at once instead of a rate")
    add("--serve", default="", metavar="FLAGS", help="more flags of tandem serve, in one argument")
    add("--limit", type=float, default=220.0, metavar="S", help="time limit in seconds (%(default)s)")
    arguments = parser.parse_args(argv)
    given = {
        "num_streams": arguments.streams,
        "input_tokens": arguments.input_tokens,
        "output_tokens": arguments.output_tokens,
        "num_burst": arguments.burst,
        "rate": arguments.rate,
        "seconds": arguments.seconds,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    sizes = replace(DEFAULTS[arguments.device], **chosen)
    arguments.out.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "argv": argv or sys.argv[1:],
    }
    deadline = time.monotonic() + arguments.limit
    with tempfile.TemporaryDirectory() as directory:
        flags = serve_flags(arguments, Path(directory))
        remove_results(arguments.out)
        for name in arguments.layouts:
            label, workers = LAYOUTS[name]
            try:
                more = [*workers, *shlex.split(arguments.serve)]
                summary[name] = run_layout(
                    name, label, [*flags, *more], sizes, arguments.vocab_size, arguments.out, deadline
                )
            except (StartError, EndpointError, TimeoutError, RuntimeError) as error:
                summary[name] = {"label": label, "failed": str(error)}
            print(json.dumps(summary[name]), flush=True)
            (arguments.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    is_whole = all(
        not summary[n].get("failed") and summary[n]["num_whole"] == summary[n]["num_prompts"] for n in arguments.layouts
    )
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
