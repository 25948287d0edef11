"""How many streamed tokens a second one client process of `tandem bench` takes in, on one core.

A scripted server in a process of its own sends as fast as it can, one token in a chunk, over each protocol. The
client's ceiling is what it received for each second of its own CPU time; what came in a second of the clock is limited
by the server too, and by whatever else the machine does.
"""

import sys
from collections.abc import Iterator, Sequence

from benchmarks.children import Child
from benchmarks.rows import Row, argument_parser, report
from benchmarks.scripted_server import Script, serve_scripted
from tandem.bench.client_health import client_summary
from tandem.bench.clients.base import EndpointConfig
from tandem.bench.measures import summarize
from tandem.bench.processes import run_processes
from tandem.bench.runner import RunnerConfig
from tandem.bench.workloads.prompts import PromptMaker
from tandem.bench.workloads.synthetic import Lengths, Synthetic

AIM = 20_000.0
NUM_STREAMS = 64


def rows_of(name: str, endpoint: EndpointConfig, num_tokens: int) -> Iterator[Row]:
    lengths = Lengths(num_tokens, num_tokens)
    sessions = Synthetic(PromptMaker(0, "ids"), 0, 2 * NUM_STREAMS, Lengths(16, 16), lengths).sessions()
    run = run_processes(endpoint, RunnerConfig(concurrency=NUM_STREAMS), sessions, 1)
    client, requests = client_summary(run), summarize(run.records)
    if requests["num_whole"] != 2 * NUM_STREAMS:
        raise RuntimeError(f"{requests['num_whole']} of {2 * NUM_STREAMS} requests were whole: {requests['errors']}")
    yield Row(f"{name}: for a second of the client's CPU time", client["chunks_per_cpu_s"], "tokens", low=AIM)
    yield Row("  for a second of the clock", requests["output_tokens_per_s"], "tokens")
    yield Row("  the client's share of a core", 100 * client["cpu_share"], "%")


def measure(num_tokens: int) -> list[Row]:
    rows: list[Row] = []
    with Child(serve_scripted, Script(ttft_s=0.0, gaps_s=(0.0,), is_exact=False)) as server:
        grpc_port, http_port = server.answer()
        url = f"http://127.0.0.1:{http_port}/v1"
        rows += rows_of("gRPC", EndpointConfig(f"grpc://127.0.0.1:{grpc_port}"), num_tokens)
        rows += rows_of("HTTP", EndpointConfig(url), num_tokens)
        rows += rows_of("HTTP, counted with each chunk", EndpointConfig(url, continuous_usage=True), num_tokens)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every aim is met, 1 otherwise."""
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=500, help="of each of 128 streams (%(default)s)")
    arguments = parser.parse_args(argv)
    return report(measure(arguments.tokens), "What one client process takes in", arguments.json)


if __name__ == "__main__":
    sys.exit(main())
