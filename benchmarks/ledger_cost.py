"""Measures the cost of the ledger: the router's CPU per token and time to the first token, with and without it.

Two real routers with scripted workers take turns under the same clients. One is patched to stamp nothing, make no
phases and fill no histograms, and its workers send no moments. Requests are whole, because most of the cost is per
request. Intervals are for the median over all pairs of runs, at 95 % or slightly more.
"""

import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import router_clients as clients
from benchmarks.children import Child
from benchmarks.router_model import write_model_dir
from benchmarks.router_servers import serve_router
from benchmarks.router_workers import serve_workers
from benchmarks.rows import Row, argument_parser, report
from tandem.router import attempts, router
from tandem.router.attempts import Attempts
from tandem.router.frontends import base, generation
from tandem.router.observe.histograms import Histogram
from tandem.router.observe.metrics import RouterMetrics

# Ratios with / without: tokens per CPU second, and time to the first token.
MIN_RATE_RATIO = 0.98
MAX_WAIT_RATIO = 1.02
NUM_AT_ONCE = 64
STEP_INTERVAL_S = NUM_AT_ONCE * 150e-6
NUM_FIRST_TOKENS = 3
NAMES = {True: "with", False: "without"}


def serve_router_without(pipe: Connection, model_dir: str, log_dir: str) -> None:
    """As serve_router, without ledger and metrics."""

    def nothing(*_: Any, **__: Any) -> None: ...

    def no_time() -> int:
        return 0

    modules: tuple[Any, ...] = (attempts, base, generation, router)
    for module in modules:
        module.now_ns = no_time
    modules[2].phase_timings = lambda moments: []
    for cls, name in ((Attempts, "_stamp"), (Histogram, "observe"), (RouterMetrics, "request_ended")):
        setattr(cls, name, nothing)
    modules[3].PROBE_INTERVAL_S = math.inf
    serve_router(pipe, model_dir, log_dir)


class Side:
    def __init__(self, held: ExitStack, directory: str, *, keeps_ledger: bool) -> None:
        serve = serve_router if keeps_ledger else serve_router_without
        self.router = held.enter_context(Child(serve, directory, directory))
        addresses = self.router.answer()
        self.address = addresses.grpc
        self.workers = held.enter_context(Child(serve_workers, addresses.cluster, keeps_ledger))
        self.workers.answer()

    def pace(self, step_interval_s: float) -> None:
        self.workers.ask(step_interval_s)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a distribution-free 95 % confidence interval of the median; the whole range below six values."""
    ordered, num = sorted(values), len(values)
    left_out, tail = 0, 1 / 2**num
    while tail + math.comb(num, left_out + 1) / 2**num <= 0.025:
        left_out += 1
        tail += math.comb(num, left_out) / 2**num
    return ordered[left_out], ordered[-1 - left_out]


def ratio_rows(name: str, ratios: Sequence[float], **limit: float) -> list[Row]:
    low, high = median_interval(ratios)
    return [
        Row(f"{name}: with / without", statistics.median(ratios), "", **limit),
        Row("  from", low, ""),
        Row("  to", high, ""),
    ]


def measure(num_pairs: int, num_requests: int, num_tokens: int, num_waits: int) -> list[Row]:
    rates: dict[bool, list[float]] = {True: [], False: []}
    # Several tokens in one message are cheaper: both sides need about one.
    per_message: dict[bool, list[float]] = {True: [], False: []}
    waits: dict[bool, list[float]] = {True: [], False: []}
    with ExitStack() as held:
        directory = held.enter_context(tempfile.TemporaryDirectory())
        write_model_dir(Path(directory))
        sides = {kept: Side(held, directory, keeps_ledger=kept) for kept in (True, False)}
        asked = held.enter_context(Child(clients.serve_clients))
        for number in range(-1, num_pairs):
            order = (True, False) if number % 2 else (False, True)
            for kept in order:
                side = sides[kept]
                side.pace(STEP_INTERVAL_S)
                run = (clients.requests, side.address, side.router.pid, num_requests, NUM_AT_ONCE, num_tokens)
                usage = asked.ask(run, clients.RUN_TIMEOUT_S)
                side.pace(0.0)
                if number >= 0:
                    rates[kept].append(usage.num_tokens / usage.cpu_s)
                    per_message[kept].append(usage.num_tokens / usage.num_messages)
            addresses = [sides[kept].address for kept in order]
            results = asked.ask((clients.first_tokens, addresses, num_waits, NUM_FIRST_TOKENS), clients.RUN_TIMEOUT_S)
            if number >= 0:
                for kept, result in zip(order, results, strict=True):
                    waits[kept].append(statistics.median(result.waits))
    rows = ratio_rows(
        f"{num_tokens}-token requests, tokens/CPU s",
        [on / off for on, off in zip(rates[True], rates[False], strict=True)],
        low=MIN_RATE_RATIO,
    )
    rows += [Row(f"  {name}", statistics.median(rates[kept]), "tokens/CPU s") for kept, name in NAMES.items()]
    rows += [Row(f"  {name}", statistics.median(per_message[kept]), "tokens/message") for kept, name in NAMES.items()]
    rows += ratio_rows(
        "first token, p50", [on / off for on, off in zip(waits[True], waits[False], strict=True)], high=MAX_WAIT_RATIO
    )
    rows += [Row(f"  {name}", statistics.median(waits[kept]), "ms") for kept, name in NAMES.items()]
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=20, help="measured pairs of runs (%(default)s)")
    parser.add_argument("--requests", type=int, default=256, help="per run (%(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="output tokens per request (%(default)s)")
    parser.add_argument("--waits", type=int, default=100, help="requests per run for first tokens (%(default)s)")
    arguments = parser.parse_args(argv)
    rows = measure(arguments.pairs, arguments.requests, arguments.tokens, arguments.waits)
    return report(rows, "What the ledger costs", arguments.json)


if __name__ == "__main__":
    sys.exit(main())
