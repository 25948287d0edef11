"""Runs four classical experiments of disaggregated serving and writes their figures.

1. Burst: prompts that arrive at once beside running streams. Compares two workers of role both with a prefill and a
   decode worker, each with whole and with chunked prefill.
2. Concurrency: one request at a time against eight.
3. Caches: cold and warm prompts, eight with one prefix at once, and prompts asked again after eviction.
4. Start: seconds until the cluster is ready, and GPU memory.

Five clusters start one after the other. DIRECTORY gets results.json, updated after each cluster, and README.md.

  python -m benchmarks.reproduce_lab --out DIRECTORY
  python -m benchmarks.reproduce_lab --device cuda --model MODEL_DIRECTORY --load-format dummy --out DIRECTORY
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console

from benchmarks.served import Served, StartError, within
from benchmarks.steady_streams import add_model_arguments, serve_flags
from tandem.bench.arrivals import ArrivalConfig
from tandem.bench.clients.base import EndpointConfig, EndpointError
from tandem.bench.command import measure
from tandem.bench.config import BenchConfig, WorkloadConfig
from tandem.bench.measures import distribution
from tandem.bench.records import RequestRecord
from tandem.bench.workloads.synthetic import Lengths
from tandem.client import TandemError
from tandem.lifecycle import CRITICAL_PATH

MANY = 8
# The default page size of `tandem serve`.
PAGE_SIZE = 16
# Tokens of the prompts that evict the first ones, over the pool's capacity.
FILL = 1.5
LAYOUTS = {"both": ("--both", "2"), "1p1d": ("--prefill", "1", "--decode", "1")}
FAILURES = (StartError, EndpointError, TandemError, grpc.RpcError, RuntimeError, OSError)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths are in tokens.

    Attributes:
        lead_s: seconds that streams run before the burst.
        chunk, whole: --chunk-size of chunked and of whole prefill; chunk < burst_input <= whole.
        num_alone, num_beside: requests one at a time and eight at a time.
        cache_pages, max_model_len: limits in the cache experiment; a pool that its prompts can fill.
        tail: tokens by which prompts with one prefix differ.
    """

    num_streams: int
    stream_output: int
    burst_input: int
    burst_output: int
    chunk: int
    whole: int
    num_alone: int
    request_input: int
    request_output: int
    cached_input: int
    cache_pages: int
    max_model_len: int
    start_timeout_s: float
    run_timeout_s: float
    num_warmup: int = 4
    num_burst: int = 50
    stream_input: int = 32
    lead_s: float = 2.0
    num_beside: int = 16
    num_prompts: int = 4
    cached_output: int = 16
    tail: int = 16


DEFAULTS = {
    "cpu": Sizes(4, 448, 96, 8, 32, 512, 3, 128, 32, 192, 256, 512, 120.0, 120.0),
    "cuda": Sizes(32, 4096, 2048, 64, 512, 8192, 6, 2048, 128, 4096, 4096, 16_384, 75.0, 40.0, num_warmup=8),
}


class Lab:
    """Attributes: results: figures of the finished experiments, as written to results.json."""

    def __init__(self, flags: Sequence[str], sizes: Sizes, vocab_size: int, log_dir: Path, deadline: float) -> None:
        """Args: flags: of `tandem serve`, for all clusters; deadline: on the monotonic clock."""
        self._flags = flags
        self._sizes = sizes
        self._vocab_size = vocab_size
        self._log_dir = log_dir
        self._deadline = deadline
        self.results: dict[str, Any] = {"burst": {}, "concurrency": {}, "cache": {}, "starts": {}, "failures": {}}

    def run(self) -> Iterable[str]:
        """Runs all experiments; yields each cluster's name when it has ended. Failures go to the results."""
        sizes = self._sizes
        chunk_sizes = {"whole": sizes.whole, "chunked": sizes.chunk}
        # The most telling clusters come first, in case time runs out.
        for name in ("both/whole", "1p1d/whole", "1p1d/cache", "both/chunked", "1p1d/chunked"):
            layout, kind = name.split("/")
            flags = [*self._flags, *LAYOUTS[layout], "--chunk-size", str(chunk_sizes.get(kind, sizes.whole))]
            if kind == "cache":
                flags += ["--num-pages", str(sizes.cache_pages), "--max-model-len", str(sizes.max_model_len)]
            try:
                timeout_s = min(sizes.start_timeout_s, self._left_s())
                with Served(flags, self._log_dir / name.replace("/", "-"), timeout_s) as served:
                    self.results["starts"][name] = {
                        "ready_s": served.ready_s,
                        "gpu_memory": gpu_memory(served.log_dir),
                    }
                    with within(self._left_s(), name):
                        self._measure(served.address, name, layout, kind)
            except FAILURES as error:
                self.results["failures"][name] = str(error) or type(error).__name__
            yield name

    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

    def _measure(self, address: str, name: str, layout: str, kind: str) -> None:
        sizes = self._sizes
        warm_up = self._workload(sizes.num_warmup, sizes.burst_input, sizes.burst_output, seed=99)
        self._load(address, warm_up, ArrivalConfig(concurrency=sizes.num_warmup))
        if kind == "cache":
            self._cache(address)
            return
        self.results["burst"][name] = self._burst(address)
        if kind == "whole":
            for concurrency, count in ((1, sizes.num_alone), (MANY, sizes.num_beside)):
                workload = self._workload(count, sizes.request_input, sizes.request_output, seed=concurrency)
                result, records = self._load(address, workload, ArrivalConfig(concurrency=concurrency))
                self.results["concurrency"][f"{layout}, {concurrency} at a time"] = figures(result, records)

    def _burst(self, address: str) -> dict[str, Any]:
        sizes = self._sizes
        workload = replace(
            self._workload(sizes.num_burst, sizes.burst_input, sizes.burst_output),
            kind="steady-streams",
            num_streams=sizes.num_streams,
            stream_input_tokens=sizes.stream_input,
            stream_output_tokens=sizes.stream_output,
            lead_s=sizes.lead_s,
        )
        arrivals = ArrivalConfig("burst", rate=sizes.num_burst, burst_size=sizes.num_burst)
        result, records = self._load(address, workload, arrivals)
        quiet = gaps_before(records, result["requests"]["begin_s"])
        return {**figures(result, records), "streams_itl": slim(result["streams"]["itl"]), "quiet_itl": slim(quiet)}

    def _cache(self, address: str) -> None:
        sizes = self._sizes
        num_others = round(FILL * sizes.cache_pages * PAGE_SIZE / sizes.cached_input)
        prefix = sizes.cached_input - sizes.tail
        # The same seed has the same prompts.
        for name, seed, count, concurrency, num_shared in (
            ("cold", 11, sizes.num_prompts, 1, 0),
            ("warm", 11, sizes.num_prompts, 1, 0),
            ("eight different", 13, MANY, MANY, 0),
            ("eight with one prefix", 12, MANY, MANY, prefix),
            ("others, to fill the pools", 14, num_others, 2, 0),
            ("cold ones again", 11, sizes.num_prompts, 1, 0),
        ):
            workload = self._workload(count, sizes.cached_input - num_shared, sizes.cached_output, seed)
            workload = replace(workload, num_system_tokens=num_shared)
            result, records = self._load(address, workload, ArrivalConfig(concurrency=concurrency))
            answers = [record.output_digest for record in sorted(records, key=lambda record: record.index)]
            found = {**figures(result, records), "cached_share": cached_share(records), "answers": answers}
            self.results["cache"][name] = found

    def _workload(self, count: int, num_input: int, num_output: int, seed: int = 0) -> WorkloadConfig:
        return WorkloadConfig(
            num_requests=count,
            input_lengths=Lengths(num_input, num_input),
            output_lengths=Lengths(num_output, num_output),
            vocab_size=self._vocab_size,
            seed=seed,
        )

    def _load(
        self, address: str, workload: WorkloadConfig, arrivals: ArrivalConfig
    ) -> tuple[dict[str, Any], list[RequestRecord]]:
        """Raises TimeoutError, and RuntimeError if a request fails."""
        timeout_s = self._sizes.run_timeout_s
        config = BenchConfig(EndpointConfig(f"grpc://{address}", timeout_s=timeout_s), workload, arrivals)
        with within(timeout_s, "a load"):
            result, run = measure(config, Console(quiet=True))
        requests = result["requests"]
        if requests["num_whole"] < requests["num_requests"]:
            examples = requests["error_examples"]
            raise RuntimeError(f"{requests['num_whole']} of {requests['num_requests']} requests were whole: {examples}")
        return result, run.records


def figures(result: dict[str, Any], records: Sequence[RequestRecord]) -> dict[str, Any]:
    requests = result["requests"]
    return {
        "num_requests": requests["num_requests"],
        "ttft": slim(requests["ttft"]),
        "itl": slim(requests["itl"]),
        "duration_s": requests["duration_s"],
        "output_tokens_per_s": requests["output_tokens_per_s"],
        "phases_ms": phase_means(records),
    }


def slim(values: dict[str, Any] | None) -> dict[str, Any] | None:
    """A distribution without its curve."""
    return values and {name: value for name, value in values.items() if name != "curve"}


def phase_means(records: Iterable[RequestRecord]) -> dict[str, float]:
    """Mean milliseconds of each phase over the requests without an error; a missing phase counts as 0."""
    timed = [record.phases_ms for record in records if record.group == "requests" and not record.error]
    names = dict.fromkeys(name for phases in timed for name in phases)
    return {name: sum(phases.get(name, 0.0) for phases in timed) / len(timed) for name in names}


def gaps_before(records: Iterable[RequestRecord], moment_s: float) -> dict[str, Any] | None:
    """Distribution of the streams' gaps that ended before `moment_s`, in seconds."""
    streams = [record for record in records if record.group == "streams"]
    return distribution(
        after - before for record in streams for before, after in pairwise(record.times) if after < moment_s
    )


def cached_share(records: Sequence[RequestRecord]) -> float:
    """Share of the prompts' tokens that prefill found in its cache."""
    num_tokens = sum(record.prompt_tokens or record.wanted_input_tokens for record in records)
    return sum(record.cached_tokens or 0 for record in records) / num_tokens


def gpu_memory(log_dir: Path) -> dict[str, str]:
    """Each worker's log line about GPU memory; empty on a CPU."""
    mark = "GPU memory in GiB: "
    return {
        log.stem: line.partition(mark)[2]
        for log in sorted(log_dir.glob("*.log"))
        for line in log.read_text(errors="replace").splitlines()
        if mark in line
    }


def report(results: dict[str, Any]) -> str:
    """Returns the figures as Markdown tables."""

    def ms(values: dict[str, Any] | None, *names: str) -> list[str]:
        return [f"{values[name] * 1e3:,.1f}" if values else "" for name in names]

    burst = [
        (
            name,
            *ms(run["ttft"], "p50", "p99"),
            *ms(run["quiet_itl"], "p50"),
            *ms(run["streams_itl"], "p50", "p99", "max"),
            f"{run['duration_s']:.1f}",
        )
        for name, run in results["burst"].items()
    ]
    concurrency = [
        (name, *ms(run["ttft"], "p50", "p99"), *ms(run["itl"], "p50", "p99"), f"{run['output_tokens_per_s']:,.1f}")
        for name, run in results["concurrency"].items()
    ]
    cold = results["cache"].get("cold", {}).get("answers")
    cache = [
        (
            name,
            str(run["num_requests"]),
            *ms(run["ttft"], "p50", "max"),
            f"{run['cached_share']:.0%}",
            ("yes" if run["answers"] == cold else "no") if name in ("warm", "cold ones again") else "",
        )
        for name, run in results["cache"].items()
    ]
    phases = [
        (name, *(f"{run['phases_ms'].get(spec.name, 0.0):,.1f}" for spec in CRITICAL_PATH))
        for name, run in (results["burst"] | results["concurrency"]).items()
    ]
    starts = [
        (name, f"{start['ready_s']:.1f}", "; ".join(f"{w}: {line}" for w, line in start["gpu_memory"].items()))
        for name, start in results["starts"].items()
    ]
    failures = [f"- {name}: {failure}" for name, failure in results["failures"].items()]
    burst_columns = ("streams' ITL before, p50", "in the burst, p50", "p99", "longest", "all answered after, s")
    parts = [
        f"# {results['model']} on {results['device']}\n\n`{results['command']}`, {results['began']}. Times are in ms.",
        "## 1. A burst\n\n" + _table(("workers", "TTFT p50", "p99", *burst_columns), burst),
        "## 2. One request, and eight\n\n"
        + _table(("workers", "TTFT p50", "p99", "ITL p50", "p99", "output tokens/s"), concurrency),
        "Mean phases of a request:\n\n" + _table(("workers", *(spec.name for spec in CRITICAL_PATH)), phases),
        "## 3. The radix caches\n\n"
        + _table(("step", "requests", "TTFT p50", "longest", "cached at prefill", "answers as cold"), cache),
        "## 4. Start and memory\n\n" + _table(("cluster", "ready after, s", "GPU memory, GiB"), starts),
        *(["## Not measured\n\n" + "\n".join(failures)] if failures else []),
    ]
    return "\n\n".join(parts) + "\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every experiment was measured, 1 otherwise."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    add: Any = parser.add_argument
    add("--limit", type=float, default=290.0, metavar="S", help="time limit in seconds (%(default)s)")
    add("--burst", type=int, metavar="N", help="prompts that arrive at once (50)")
    add("--lead", type=float, metavar="S", help="seconds that streams run before the burst (2)")
    arguments = parser.parse_args(argv)
    given = {"num_burst": arguments.burst, "lead_s": arguments.lead}
    sizes = replace(DEFAULTS[arguments.device], **{name: value for name, value in given.items() if value is not None})
    about = {
        "command": shlex.join(["python", "-m", "benchmarks.reproduce_lab", *argv]),
        "began": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "device": arguments.device,
        "model": Path(arguments.model).name,
        "load_format": arguments.load_format,
        "sizes": asdict(sizes),
    }
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + arguments.limit
    with tempfile.TemporaryDirectory() as directory:
        flags = serve_flags(arguments, Path(directory))
        lab = Lab(flags, sizes, arguments.vocab_size, Path(directory), deadline)
        for name in lab.run():
            print(f"{name}: {lab.results['failures'].get(name, 'measured')}", flush=True)
            (out / "results.json").write_text(json.dumps(about | lab.results, indent=1) + "\n")
    (out / "README.md").write_text(report(about | lab.results))
    return 1 if lab.results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
