"""Measures the router: CPU per token and per request, added time to the first token, memory over many requests.

Four processes: a real router; scripted prefill and decode workers on real control streams; clients over loopback; and a
bare gRPC server ("raw") that sends the same messages to the same clients. Router and raw take turns. CPU time is that
of the server's process alone, so other load on the machine matters little.

Tokens are measured while all streams run: `full`, as fast as gRPC takes the messages, and `paced`, one step at fixed
intervals. A router that falls behind puts several tokens into one message, which makes each cheaper: the table has
tokens per message.
"""

import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import router_clients as clients
from benchmarks.children import Child, rss_mib
from benchmarks.router_model import write_model_dir
from benchmarks.router_servers import serve_raw, serve_router
from benchmarks.router_workers import serve_workers
from benchmarks.rows import Row, argument_parser, report

MIN_RATIO = 0.5
MAX_FIRST_TOKEN_MS = 2.0
MAX_GROWTH_MIB = 5.0
# Whole requests: how many are in hand, and output tokens of a long and of a short one.
NUM_AT_ONCE = 64
NUM_LONG_TOKENS = 256
NUM_SHORT_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Sizes:
    """
    Attributes:
        seconds: measured time of each server in a round.
        step_interval_s: of the slow pace.
        sample_every: short requests to warm up, and between samples of memory.
    """

    streams: Sequence[int] = (64, 512)
    seconds: float = 2.0
    rounds: int = 5
    step_interval_s: float = 150e-6
    long_requests: int = 128
    first_tokens: int = 300
    requests: int = 100_000
    sample_every: int = 10_000


class Bench:
    def __enter__(self) -> "Bench":
        with ExitStack() as held:
            directory = held.enter_context(tempfile.TemporaryDirectory())
            write_model_dir(Path(directory))
            self.router = held.enter_context(Child(serve_router, directory, directory))
            self.raw = held.enter_context(Child(serve_raw))
            self._clients = held.enter_context(Child(clients.serve_clients))
            addresses = self.router.answer()
            self.addresses = {"router": addresses.grpc, "http": addresses.http, "raw": self.raw.answer()}
            self._workers = held.enter_context(Child(serve_workers, addresses.cluster))
            self._workers.answer()
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def pace(self, step_interval_s: float) -> None:
        for child in (self.raw, self._workers):
            child.ask(step_interval_s)

    def run(self, function: Any, *arguments: Any) -> Any:
        """Run a function of benchmarks.router_clients in the clients' process."""
        return self._clients.ask((function, *arguments), clients.RUN_TIMEOUT_S)

    def usage(self, side: str, function: Any, *arguments: Any) -> clients.Usage:
        """As `run`, for the server "router", "http" (the router's other frontend) or "raw"."""
        server = self.raw if side == "raw" else self.router
        return self.run(function, self.addresses[side], server.pid, *arguments)


def stream_rows(bench: Bench, num_streams: int, sizes: Sizes, *, paced: bool) -> Iterator[Row]:
    bench.pace(num_streams * sizes.step_interval_s if paced else 0.0)
    rates: dict[str, list[float]] = {"raw": [], "router": [], "http": []}
    per_message: dict[str, list[float]] = {side: [] for side in rates}
    for _ in range(sizes.rounds):
        for side in rates:
            function = clients.stream_http if side == "http" else clients.stream
            usage = bench.usage(side, function, num_streams, sizes.seconds)
            rates[side].append(usage.num_tokens / usage.cpu_s)
            per_message[side].append(usage.num_tokens / usage.num_messages)
    what = f"{num_streams} streams, {'paced' if paced else 'full'}"
    print(f"{what}:", {side: [round(rate) for rate in taken] for side, taken in rates.items()}, flush=True)
    ratios = [router / raw for router, raw in zip(rates["router"], rates["raw"], strict=True)]
    yield Row(f"{what}: ratio", statistics.median(ratios), "", low=MIN_RATIO)
    for side, taken in rates.items():
        yield Row(f"  {side}", statistics.median(taken), "tokens/CPU s")
    for side in ("router", "http"):
        yield Row(f"  {side}", statistics.median(per_message[side]), "tokens/message")


def long_request_rows(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    """Measure a token's cost including its share of a whole request; paced."""
    bench.pace(NUM_AT_ONCE * sizes.step_interval_s)
    rates: dict[str, list[float]] = {"raw": [], "router": []}
    for _ in range(sizes.rounds):
        for side, taken in rates.items():
            usage = bench.usage(side, clients.requests, sizes.long_requests, NUM_AT_ONCE, NUM_LONG_TOKENS)
            taken.append(usage.num_tokens / usage.cpu_s)
    ratios = [router / raw for router, raw in zip(rates["router"], rates["raw"], strict=True)]
    yield Row(f"{NUM_LONG_TOKENS}-token requests: ratio", statistics.median(ratios), "", low=MIN_RATIO)
    for side, taken in rates.items():
        yield Row(f"  {side}", statistics.median(taken), "tokens/CPU s")


def first_token_rows(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    bench.pace(0.0)
    addresses = (bench.addresses["raw"], bench.addresses["router"])
    bench.run(clients.first_tokens, addresses, sizes.first_tokens // 10 + 1, NUM_SHORT_TOKENS)
    raw, router = bench.run(clients.first_tokens, addresses, sizes.first_tokens, NUM_SHORT_TOKENS)
    raw_waits, router_waits = (statistics.quantiles(result.waits, n=100) for result in (raw, router))
    for percent, high in ((50, MAX_FIRST_TOKEN_MS), (99, None)):
        ours, theirs = router_waits[percent - 1], raw_waits[percent - 1]
        yield Row(f"first token, p{percent}: added", ours - theirs, "ms", high=high)
        yield Row("  raw", theirs, "ms")
        yield Row("  router", ours, "ms")
    yield from first_token_parts(router.phases)


def first_token_parts(requests: Sequence[dict[str, tuple[float, float]]]) -> Iterator[Row]:
    parts: dict[str, list[float]] = {"tokenize": [], "choose workers": [], "to the worker": [], "and back": []}
    for phases in requests:
        tokenized = phases["tokenize"][1]
        assigned, queued = phases["prefill_queue"]
        parts["tokenize"].append(tokenized)
        parts["choose workers"].append(assigned - tokenized)
        parts["to the worker"].append(queued)
        parts["and back"].append(phases["ttft"][1] - assigned - queued)
    for name, times in parts.items():
        yield Row(f"    {name}, p50", statistics.median(times), "ms")


def short_request_rows(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    bench.pace(0.0)

    def cpu_us(side: str) -> float:
        usage = bench.usage(side, clients.requests, sizes.sample_every, NUM_AT_ONCE, NUM_SHORT_TOKENS)
        return 1e6 * usage.cpu_s / sizes.sample_every

    costs, samples = [cpu_us("router")], [rss_mib(bench.router.pid)]
    for _ in range(0, sizes.requests, sizes.sample_every):
        costs.append(cpu_us("router"))
        samples.append(rss_mib(bench.router.pid))
    yield Row(f"{NUM_SHORT_TOKENS}-token request: router", statistics.median(costs), "CPU us")
    yield Row("  raw", cpu_us("raw"), "CPU us")
    growth = max(samples[1:]) - samples[0]
    yield Row(f"growth over {sizes.requests:,} of them", growth, "MiB", high=MAX_GROWTH_MIB)
    for number, rss in enumerate(samples):
        yield Row(f"  memory after {sizes.sample_every * number:,}", rss, "MiB")


def measure(sizes: Sizes) -> list[Row]:
    with Bench() as bench:
        rows = [
            row
            for num_streams in sizes.streams
            for paced in (False, True)
            for row in stream_rows(bench, num_streams, sizes, paced=paced)
        ]
        rows += long_request_rows(bench, sizes)
        rows += first_token_rows(bench, sizes)
        if sizes.requests:
            rows += short_request_rows(bench, sizes)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    sizes = Sizes()
    parser.add_argument("--rounds", type=int, default=sizes.rounds, help="turns of each server (%(default)s)")
    parser.add_argument(
        "--requests", type=int, default=sizes.requests, help="short requests; 0 leaves memory out (%(default)s)"
    )
    arguments = parser.parse_args(argv)
    rows = measure(Sizes(rounds=arguments.rounds, requests=arguments.requests))
    return report(rows, "What the router costs", arguments.json)


if __name__ == "__main__":
    sys.exit(main())
