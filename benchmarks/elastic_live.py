"""Runs an elastic cluster under a load that rises and falls, and draws its size and latencies.

    python -m benchmarks.elastic_live --out docs/reports/elastic-cpu

Starts `tandem serve --workers 1:3` on CPUs, replays made arrivals with `tandem bench`, and asks the cluster for its
size once a second. Writes run.json and elastic.png. Exit status 1: a request failed.
"""

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.served import Served
from tandem.client import TandemClient, TandemError

START_TIMEOUT_S = 300.0
# After the last arrival: requests end, and workers drain.
AFTER_S = 30.0
BIN_S = 5.0
DPI = 110


def parse_profile(text: str) -> list[tuple[float, float]]:
    """Parses `60:0.5,120:3` to pairs of seconds and requests per second."""
    try:
        pairs = [tuple(map(float, part.split(":"))) for part in text.split(",")]
        return [(seconds, rate) for seconds, rate in pairs]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be like 60:0.5,120:3, not {text!r}") from None


def arrivals(profile: Sequence[tuple[float, float]], seed: int) -> list[float]:
    """Returns the arrival times of a Poisson process whose rate changes by steps."""
    rng, times, begin = random.Random(seed), [], 0.0
    for seconds, rate in profile:
        moment = begin + rng.expovariate(rate)
        while moment < begin + seconds:
            times.append(moment)
            moment += rng.expovariate(rate)
        begin += seconds
    return times


def write_trace(path: Path, times: Sequence[float], num_input: int, num_output: int) -> None:
    zero = datetime(2026, 1, 1, tzinfo=UTC)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
        for moment in times:
            at = (zero + timedelta(seconds=moment)).strftime("%Y-%m-%d %H:%M:%S.%f")
            rows.writerow((at, num_input, num_output))


class Sampler:
    """Asks for the cluster's size once a second, on a thread.

    Attributes:
        samples: sizes, each with its time of time.monotonic as `at`.
    """

    def __init__(self, address: str) -> None:
        self.samples: list[dict[str, Any]] = []
        self._client = TandemClient(address)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            try:
                info = self._client.server_info()
            except TandemError:
                continue
            for size in info.sizes:
                names = ("target", "ready", "starting", "leaving", "start_s")
                self.samples.append({"at": time.monotonic(), **{name: getattr(size, name) for name in names}})


def run(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    trace, requests = directory / "trace.csv", directory / "requests.jsonl"
    write_trace(trace, arrivals(arguments.profile, arguments.seed), arguments.input_tokens, arguments.output_tokens)
    flags = [
        *("--model", arguments.model, "--workers", arguments.workers, "--threads", "1"),
        *("--ttft-objective", str(arguments.ttft_objective), "--itl-objective", str(arguments.itl_objective)),
    ]
    with Served(flags, directory / "logs", START_TIMEOUT_S) as served:
        sampler = Sampler(served.address)
        began = time.monotonic()
        bench = subprocess.run(
            [
                *(sys.executable, "-m", "tandem.deploy.cli.main", "bench", "--endpoint", f"grpc://{served.address}"),
                *("--workload", "azure", "--trace", str(trace), "--seed", str(arguments.seed)),
                *("--requests-out", str(requests)),
            ],
            check=False,
        )
        time.sleep(AFTER_S)
        sampler.close()
        lines = [line for line in served.lines if " -> " in line or "no more" in line]
    records = [json.loads(line) for line in requests.read_text().splitlines()] if requests.exists() else []
    return {
        "flags": flags,
        "profile": arguments.profile,
        "status": bench.returncode,
        "sizes": [{**sample, "at": round(sample["at"] - began, 1)} for sample in sampler.samples],
        "requests": [_summary(record) for record in records if "times_s" in record],
        "log": lines,
    }


def _summary(record: dict[str, Any]) -> dict[str, Any]:
    times = record["times_s"]
    return {
        "due_s": record["due_s"],
        "ttft_s": round(times[0] - record["due_s"], 3) if times else None,
        "gaps_ms": [round(1e3 * (after - before)) for before, after in pairwise(times)],
        "first_s": times[0] if times else None,
        "error": record["error"],
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws rate, workers, TTFT and ITL over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    load, workers, ttft, itl = figure.subplots(4, 1, sharex=True)
    due = [request["due_s"] for request in result["requests"]]
    bins = [BIN_S * number for number in range(int(max(due, default=0.0) / BIN_S) + 2)]
    load.hist(due, bins, weights=[1 / BIN_S] * len(due), color="#8aa7c7")
    load.set_ylabel("requests/s")
    at = [sample["at"] for sample in result["sizes"]]
    for name, colour in (("target", "#b0413e"), ("ready", "#1f4e79")):
        workers.step(at, [sample[name] for sample in result["sizes"]], where="post", color=colour, label=name)
    workers.set_ylabel("workers")
    workers.legend(fontsize=8, loc="upper right")
    served = [request for request in result["requests"] if request["ttft_s"] is not None]
    ttft.plot([r["due_s"] for r in served], [r["ttft_s"] for r in served], ".", color="#1f4e79", markersize=4)
    ttft.set_ylabel("TTFT, s")
    middle, longest = _gaps_by_bin(served)
    itl.plot(*middle, drawstyle="steps-post", color="#222222", label="median")
    itl.plot(*longest, drawstyle="steps-post", color="#b0413e", linewidth=0.8, label="99 of 100 are shorter")
    itl.set_ylabel("ITL, ms")
    itl.legend(fontsize=8, loc="upper right")
    itl.set_xlabel("seconds since the first arrivals")
    for axes in (load, workers, ttft, itl):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    failed = sum(bool(request["error"]) for request in result["requests"])
    load.set_title(f"{len(result['requests'])} requests, {failed} failed", fontsize=10, loc="left")
    figure.savefig(path, format="png", dpi=DPI)


Line = tuple[list[float], list[float]]


def _gaps_by_bin(requests: Sequence[dict[str, Any]]) -> tuple[Line, Line]:
    gaps: dict[float, list[float]] = {}
    for request in requests:
        moment = request["first_s"]
        for gap in request["gaps_ms"]:
            moment += gap / 1e3
            gaps.setdefault(BIN_S * int(moment / BIN_S), []).append(gap)
    at = sorted(gaps)
    ordered = [sorted(gaps[moment]) for moment in at]
    return (at, [one[len(one) // 2] for one in ordered]), (at, [one[int(0.99 * (len(one) - 1))] for one in ordered])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIRECTORY")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--workers", default="1:3", metavar="LOW:HIGH")
    parser.add_argument(
        "--profile", type=parse_profile, default=parse_profile("30:0.1,75:0.8,170:0.05"), metavar="S:RATE,..."
    )
    parser.add_argument("--input-tokens", type=int, default=48)
    parser.add_argument("--output-tokens", type=int, default=12)
    parser.add_argument("--ttft-objective", type=float, default=4000.0, metavar="MS")
    parser.add_argument("--itl-objective", type=float, default=800.0, metavar="MS")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        result = run(arguments, Path(directory))
    (arguments.out / "run.json").write_text(json.dumps(result) + "\n")
    draw(result, arguments.out / "elastic.png")
    failed = [request for request in result["requests"] if request["error"]]
    print("\n".join(result["log"]))
    print(f"{len(result['requests'])} requests, {len(failed)} failed")
    return 1 if failed or not result["requests"] else 0


if __name__ == "__main__":
    sys.exit(main())
