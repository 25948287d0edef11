"""`tandem bench` and another tool against one server, and how far their figures are apart.

Both send as many requests of the same lengths, so many at a time, to completions over HTTP. Without --url they measure
a scripted server, which knows its own figures too. Its times are long, so that what a tool itself adds does not count.
Each tool is installed in an environment of its own:

  python -m benchmarks.bench_against --guidellm VENV/bin/guidellm --aiperf VENV/bin/aiperf --tokenizer MODEL_DIR
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.children import Child
from benchmarks.rows import Row, argument_parser, report
from benchmarks.scripted_server import MODEL, Script, serve_scripted
from tandem.bench.clients.base import EndpointConfig
from tandem.bench.measures import summarize
from tandem.bench.processes import run_processes
from tandem.bench.runner import RunnerConfig
from tandem.bench.workloads.prompts import PromptMaker
from tandem.bench.workloads.synthetic import Lengths, Synthetic

RUN_TIMEOUT_S = 580
# Ours over theirs.
LOW, HIGH = 0.97, 1.03


@dataclass(frozen=True, slots=True)
class Load:
    """Attributes: num_warmup: requests that are left out, by those tools that can."""

    num_requests: int = 24
    num_warmup: int = 4
    concurrency: int = 2
    input_tokens: int = 32
    output_tokens: int = 32


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians, in seconds: the machine that runs both disturbs single requests.

    Attributes: per_token: from the first token to the last, for each token but the first.
    """

    ttft: float
    per_token: float
    e2e: float


def ours(url: str, model: str, load: Load) -> Figures:
    lengths = (Lengths(load.input_tokens, load.input_tokens), Lengths(load.output_tokens, load.output_tokens))
    num_requests = load.num_requests + load.num_warmup
    sessions = Synthetic(PromptMaker(7, "text"), 7, num_requests, *lengths).sessions()
    config = RunnerConfig(load.concurrency, warmup_requests=load.num_warmup)
    summary = summarize(run_processes(EndpointConfig(f"{url}/v1", model=model), config, sessions, 1).records)
    if summary["num_whole"] != load.num_requests:
        raise RuntimeError(f"{summary['num_whole']} of {load.num_requests} requests were whole: {summary['errors']}")
    return Figures(*(summary[name]["p50"] for name in ("ttft", "tpot", "e2e")))


def of_guidellm(command: str, url: str, model: str, load: Load, tokenizer: str) -> Figures:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "run.json")
        data = f"kind=synthetic_text,prompt_tokens={load.input_tokens},output_tokens={load.output_tokens}"
        _run(
            [command, "run", "--backend", f"kind=openai_http,target={url},request_format=/v1/completions",
             "--profile", f"kind=concurrent,streams={load.concurrency}",
             "--constraint", f"kind=max_requests,count={load.num_requests}",
             "--tokenizer", f"kind=huggingface_auto,model={tokenizer}", "--data", data,
             "--output", f"kind=json,path={file}", "--disable-console"]
        )  # fmt: skip
        metrics = json.loads(file.read_text())["benchmarks"][0]["metrics"]
    # What it calls ITL is the time for each token but the first.
    names = ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency")
    ttft_ms, per_token_ms, e2e = (metrics[name]["successful"]["median"] for name in names)
    return Figures(ttft_ms / 1e3, per_token_ms / 1e3, e2e)


def of_aiperf(command: str, url: str, model: str, load: Load, tokenizer: str) -> Figures:
    with tempfile.TemporaryDirectory() as directory:
        _run(
            [command, "profile", "--model", model, "--url", url, "--endpoint-type", "completions", "--streaming",
             "--tokenizer", tokenizer, "--request-count", str(load.num_requests),
             "--warmup-request-count", str(load.num_warmup), "--concurrency", str(load.concurrency),
             "--isl", str(load.input_tokens), "--osl", str(load.output_tokens),
             "--extra-inputs", "ignore_eos:true", "--use-server-token-count",
             "--ui", "none", "--output-artifact-dir", directory]
        )  # fmt: skip
        found = json.loads(next(Path(directory).rglob("profile_export_aiperf.json")).read_text())
    medians: list[float] = [
        found[name]["p50"] / 1e3 for name in ("time_to_first_token", "inter_token_latency", "request_latency")
    ]
    return Figures(*medians)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} has failed: {(done.stdout + done.stderr)[-600:]}")


def compare(name: str, mine: Figures, theirs: Figures) -> Iterator[Row]:
    for measure, words in (("ttft", "TTFT"), ("per_token", "TPOT"), ("e2e", "E2E")):
        one, other = getattr(mine, measure), getattr(theirs, measure)
        yield Row(f"{words}, median: ours over {name}'s", one / other, "", low=LOW, high=HIGH)
        yield Row("  ours", one * 1e3, "ms")
        yield Row(f"  {name}'s", other * 1e3, "ms")


@contextmanager
def _server(url: str, model: str) -> Iterator[tuple[str, str, Child | None]]:
    """A server's URL and model: the one that is named, or a scripted one, in a process that answers for itself."""
    if url:
        yield url.removesuffix("/").removesuffix("/v1"), model, None
        return
    with Child(serve_scripted, Script(ttft_s=0.5, gaps_s=(0.016, 0.024))) as server:
        _, port = server.answer()
        yield f"http://127.0.0.1:{port}", MODEL, server


def of_the_server(server: Child) -> Figures:
    """By its own clock, of the requests since the last question."""
    sent: list[tuple[float, list[float]]] = server.ask("sent")
    return Figures(
        statistics.median(times[0] - received for received, times in sent),
        statistics.median((times[-1] - times[0]) / (len(times) - 1) for _, times in sent),
        statistics.median(times[-1] - received for received, times in sent),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if all figures agree, 1 otherwise."""
    parser = argument_parser(__doc__)
    add: Any = parser.add_argument
    add("--guidellm", metavar="COMMAND", help="its command; without, it is left out")
    add("--aiperf", metavar="COMMAND", help="its command; without, it is left out")
    add("--tokenizer", required=True, metavar="DIR", help="a model's directory, for their prompts")
    add("--url", default="", help="of a server (default: a scripted one)")
    add("--model", default="", help="which --url serves")
    default = Load()
    add("--requests", type=int, default=default.num_requests, help="(%(default)s)")
    add("--concurrency", type=int, default=default.concurrency, help="(%(default)s)")
    add("--output-tokens", type=int, default=default.output_tokens, help="(%(default)s)")
    arguments = parser.parse_args(argv)
    load = Load(arguments.requests, concurrency=arguments.concurrency, output_tokens=arguments.output_tokens)
    rows: list[Row] = []
    with _server(arguments.url, arguments.model) as (url, model, server):
        if server is not None:
            mine = ours(url, model, load)
            rows += compare("the server", mine, of_the_server(server))
        for name, command, measure in (
            ("guidellm", arguments.guidellm, of_guidellm),
            ("aiperf", arguments.aiperf, of_aiperf),
        ):
            if command:
                # Ours before and after: a machine that others use may change meanwhile.
                before = ours(url, model, load)
                theirs = measure(command, url, model, load, arguments.tokenizer)
                after = ours(url, model, load)
                mean = Figures(*((getattr(before, f) + getattr(after, f)) / 2 for f in Figures.__slots__))
                rows += compare(name, mean, theirs)
    return report(rows, "tandem bench and others", arguments.json)


if __name__ == "__main__":
    sys.exit(main())
