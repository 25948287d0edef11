"""Measures the router's bookkeeping with many workers and requests.

The router runs in this process without sockets; workers are only names. Prompts have 1,000 tokens and share the first
half. Submitting is one call of `submit_request`: checking, choosing workers, informing both. Times are median CPU times
of the thread.
"""

import itertools
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence

from benchmarks.rows import Row, argument_parser, report
from tandem.lifecycle import RECEIVED
from tandem.messages import PROTOCOL_VERSION, Hello, LinkState, PageFormat
from tandem.prefix import prefix_identities
from tandem.router.config import RouterConfig
from tandem.router.policies.table import ROUTING_POLICIES
from tandem.router.process import make_policy
from tandem.router.requests.active_request import ActiveRequest
from tandem.router.requests.request_spec import RequestSpec, TokenizedPrompt
from tandem.router.router import Router
from tandem.sampling_params import SamplingParams

NUM_PROMPT_TOKENS = 1000
NUM_OUTPUT_TOKENS = 100
NUM_PAGES = 50_000
PAGE_SIZE = 16
MAX_CHOICE_MS = 1.0
# Of the quarter of a second between two checks of deadlines.
MAX_LOOK_MS = 1.0


def worker_hello(worker_id: str, role: str, num_pages: int) -> Hello:
    life, pages = f"{worker_id}-life", PageFormat("fake", 32, "fake")
    return Hello(PROTOCOL_VERSION, worker_id, life, role, "cpu", "nowhere:1", 1, pages, num_pages, PAGE_SIZE)


class Requests:
    """A router with `num_workers` prefill and as many decode workers, all linked."""

    def __init__(self, num_workers: int, routing: str, seed: int = 0) -> None:
        config = RouterConfig("nowhere", "fake", 2 * NUM_PROMPT_TOKENS, max_queued_requests=10**9)
        self.router = Router(config, make_policy(routing))
        self._random = random.Random(seed)
        self._shared = self._token_ids(NUM_PROMPT_TOKENS // 2)
        self._numbers = itertools.count(1)
        for role in ("decode", "prefill"):
            for number in range(num_workers):
                self._connect(f"{role}-{number}", role, num_workers)

    def submit(self) -> tuple[ActiveRequest, float]:
        """Return a submitted request and the milliseconds taken."""
        prompt_ids = [*self._shared, *self._token_ids(NUM_PROMPT_TOKENS - len(self._shared))]
        sampling = SamplingParams(NUM_OUTPUT_TOKENS, seed=1)
        tracker = self.router.make_tracker(
            RequestSpec(TokenizedPrompt(tuple(prompt_ids), {RECEIVED: next(self._numbers)}), sampling)
        )
        begun = time.thread_time()
        request = self.router.submit_request(tracker)
        return request, 1e3 * (time.thread_time() - begun)

    def close(self) -> None:
        self.router.shut_down()

    def _connect(self, worker_id: str, role: str, num_decode: int) -> None:
        hello = worker_hello(worker_id, role, NUM_PAGES)
        worker = self.router.connect_worker(hello, lambda _: None, lambda _: None)
        if role == "prefill":
            for number in range(num_decode):
                self.router.receive(worker, LinkState(f"decode-{number}", f"decode-{number}-life", up=True))

    def _token_ids(self, count: int) -> list[int]:
        return self._random.choices(range(1000, 100_000), k=count)


def choice_rows(num_workers: int, num_requests: int, max_ms: float | None) -> Iterator[Row]:
    for routing in ROUTING_POLICIES.names:
        requests = Requests(num_workers, routing)
        # Give every worker some history.
        for _ in range(min(num_workers, num_requests)):
            requests.router.close_request(requests.submit()[0])
        times = [requests.submit()[1] for _ in range(num_requests)]
        yield Row(f"{num_workers}x{num_workers} workers, {routing}", statistics.median(times), "ms", high=max_ms)
        requests.close()


def in_hand_rows(num_requests: int) -> Iterator[Row]:
    requests = Requests(2, "least_loaded")
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    held = [requests.submit()[0] for _ in range(num_requests)]
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    requests.router.workers.excuse_silence(3600.0)
    begun, count = time.thread_time(), 20
    for _ in range(count):
        requests.router.check_deadlines()
    look_ms = 1e3 * (time.thread_time() - begun) / count
    yield Row(f"{num_requests:,} in hand: a check of deadlines", look_ms, "ms", high=MAX_LOOK_MS)
    taken = statistics.median(requests.submit()[1] for _ in range(100))
    yield Row("  submitting one more", taken, "ms", high=MAX_CHOICE_MS)
    yield Row("  memory of each", grown / len(held) / 1024, "KiB")
    requests.close()


def identity_rows() -> Iterator[Row]:
    token_ids = tuple(random.Random(0).randrange(100_000) for _ in range(NUM_PROMPT_TOKENS))
    begun, count = time.thread_time(), 300
    for _ in range(count):
        prefix_identities(token_ids, PAGE_SIZE, "tenant")
    yield Row(
        f"prefix identities of {NUM_PROMPT_TOKENS:,} tokens", 1e3 * (time.thread_time() - begun) / count, "ms", high=0.5
    )


def measure(num_workers: int, num_requests: int, num_in_hand: int) -> list[Row]:
    return [
        *choice_rows(max(1, num_workers // 4), num_requests, None),
        *choice_rows(num_workers, num_requests, MAX_CHOICE_MS),
        *in_hand_rows(num_in_hand),
        *identity_rows(),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--workers", type=int, default=500, help="of each role (%(default)s)")
    parser.add_argument("--requests", type=int, default=200, help="per policy (%(default)s)")
    parser.add_argument("--in-hand", type=int, default=10_000, help="requests in hand (%(default)s)")
    arguments = parser.parse_args(argv)
    rows = measure(arguments.workers, arguments.requests, arguments.in_hand)
    return report(rows, "What the router's bookkeeping costs", arguments.json)


if __name__ == "__main__":
    sys.exit(main())
