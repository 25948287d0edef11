"""What it costs that workers tell routers which prefixes they have cached.

A real router in this process; workers without an engine in another, with real control streams to it, each with so many
pages cached. As many pages come and go as at full load: workers tell of them ten times a second. The router's cost is
CPU time of its process with that, less that with heartbeats alone.
"""

import asyncio
import gc
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

import grpc
import psutil

from benchmarks.children import START_TIMEOUT_S, Child, questions
from benchmarks.routing import PAGE_SIZE, worker_hello
from benchmarks.rows import Row, argument_parser, report
from tandem.engine.kvcache.cache_changes import CacheChanges, ChangeLog
from tandem.messages import Heartbeat
from tandem.prefix import IDENTITY_BYTES, namespace_identity, page_identity
from tandem.router.config import RouterConfig
from tandem.router.control_server import ControlServer
from tandem.router.policies.cache_aware import CacheAware
from tandem.router.router import Router
from tandem.rpc.auth import cluster_auth
from tandem.rpc.batch_writer import BatchWriter
from tandem.rpc.channel import bind, new_server
from tandem.rpc.codec import WORKER_CODEC
from tandem.rpc.credentials import ClusterCredentials
from tandem.rpc.grpc_loop import GrpcLoop
from tandem.rpc.loop_thread import LoopThread
from tandem.v1 import worker_pb2_grpc
from tandem.worker.engine_thread import CHANGES_INTERVAL_S
from tandem.worker.prefix_feed import CacheAccount, PrefixFeed
from tandem.worker.records import RecordKeeper
from tandem.worker.router_streams import RouterStreams

TOKEN = "benchmark"
# A prefill worker of an 8B model on an H200 computes about a hundred thousand tokens in a second.
PAGES_PER_S = 6_500
MAX_ROUTER_SHARE = 3.0
JOIN_TIMEOUT_S = 120.0
HEARTBEAT_INTERVAL_S = 0.25
NUM_MEASURED_PAGES = 100_000


class Teller:
    """A worker in which pages come and go. Attributes: pages_per_s: that come, and that go."""

    def __init__(self, number: int, address: str, num_pages: int) -> None:
        self.pages_per_s = 0
        self._pages: deque[bytes] = deque(os.urandom(IDENTITY_BYTES) for _ in range(num_pages))
        self._streams = RouterStreams(
            [address],
            worker_hello(f"prefill-{number}", "prefill", num_pages),
            credentials=ClusterCredentials(TOKEN),
            heartbeat=lambda: Heartbeat(time.monotonic_ns()),
            heartbeat_interval_s=HEARTBEAT_INTERVAL_S,
            connect_timeout_s=START_TIMEOUT_S,
            records=RecordKeeper(0),
            post=lambda event: None,
            set_peers=lambda peers: None,
            on_connected=lambda: None,
        )
        self._streams.tell_changes(CacheChanges(tuple(self._pages), ()))

    async def run(self) -> None:
        streams = asyncio.create_task(self._streams.run())
        while not streams.done():
            await asyncio.sleep(CHANGES_INTERVAL_S)
            if count := int(self.pages_per_s * CHANGES_INTERVAL_S):
                stored = tuple(os.urandom(IDENTITY_BYTES) for _ in range(count))
                removed = tuple(self._pages.popleft() for _ in range(count))
                self._pages.extend(stored)
                self._streams.tell_changes(CacheChanges(stored, removed))


def serve_tellers(pipe: Connection, address: str, num_workers: int, num_pages: int) -> None:
    """Takes how many pages come and go in a second."""
    loop_thread = LoopThread()
    loop_thread.start()
    tellers = [Teller(number, address, num_pages) for number in range(num_workers)]
    assert loop_thread.loop is not None
    for teller in tellers:
        asyncio.run_coroutine_threadsafe(teller.run(), loop_thread.loop)
    for pages_per_s in questions(pipe):
        for teller in tellers:
            teller.pages_per_s = pages_per_s
        pipe.send(None)
    loop_thread.stop()


async def _serve(router: Router) -> tuple[grpc.aio.Server, str]:
    server = new_server([cluster_auth(TOKEN)])
    worker_pb2_grpc.add_ClusterServicer_to_server(ControlServer(router), server)
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    return server, address


def router_rows(num_workers: int, num_pages: int, pages_per_s: int, seconds: float) -> Iterator[Row]:
    loop_thread = LoopThread(GrpcLoop)
    loop_thread.start()
    policy = CacheAware()
    router = loop_thread.call(_make_router(policy), START_TIMEOUT_S)
    # A server that nobody holds ends.
    server, address = loop_thread.call(_serve(router), START_TIMEOUT_S)
    gc.collect()
    before_rss, before_s = psutil.Process().memory_info().rss, time.process_time()
    with Child(serve_tellers, address, num_workers, num_pages) as child:
        _wait_for(lambda: sum(len(w.prefixes.identities) for w in router.workers) == num_workers * num_pages)
        joined_s = time.process_time() - before_s
        grown = psutil.Process().memory_info().rss - before_rss
        num_known = num_workers * num_pages
        yield Row(f"router: {num_workers} workers with {num_pages:,} pages each join, CPU time", joined_s, "s")
        yield Row("  memory of them", grown / 2**20, "MiB")
        yield Row("  of each page", grown / num_known, "bytes")
        quiet = _share(child, 0, seconds)
        busy = _share(child, pages_per_s, seconds)
        share = 100 * (busy - quiet)
        num_events = 2 * pages_per_s * num_workers
        yield Row(
            f"router: {num_workers} workers, {pages_per_s:,} pages a second come and as many go, of a core",
            share,
            "%",
            high=MAX_ROUTER_SHARE,
        )
        yield Row("  of each page that comes or goes", 1e6 * share / 100 / num_events, "µs")
    loop_thread.call(server.stop(0.0), START_TIMEOUT_S)
    loop_thread.stop()


async def _make_router(policy: CacheAware) -> Router:
    config = RouterConfig("nowhere", "fake", 1000, heartbeat_timeout_s=60.0, stall_timeout_s=60.0)
    return Router(config, policy)


def _share(child: Child, pages_per_s: int, seconds: float) -> float:
    """CPU seconds of this process in a second, while the workers tell of so many pages."""
    child.ask(pages_per_s)
    time.sleep(3 * CHANGES_INTERVAL_S)
    begun, begun_cpu = time.monotonic(), time.process_time()
    time.sleep(seconds)
    return (time.process_time() - begun_cpu) / (time.monotonic() - begun)


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the workers have not told the router what they have")
        time.sleep(0.05)


def worker_rows(num_pages: int, pages_per_s: int) -> Iterator[Row]:
    """What a page costs at the worker that has it: CPU time of the thread."""
    rng = random.Random(0)
    keys = [tuple(rng.randrange(100_000) for _ in range(PAGE_SIZE)) for _ in range(1000)]
    log = ChangeLog()
    changes: list[CacheChanges] = []
    per_turn = int(pages_per_s * CHANGES_INTERVAL_S)
    identity, names = namespace_identity(""), deque[bytes]()
    begun = time.thread_time()
    for number in range(NUM_MEASURED_PAGES):
        identity = page_identity(identity, keys[number % len(keys)])
        log.store(identity)
        names.append(identity)
        if number >= NUM_MEASURED_PAGES // 2:
            log.remove(names.popleft())
        if number % per_turn == 0 and (taken := log.take()) is not None:
            changes.append(taken)
    page_us = 1e6 * (time.thread_time() - begun) / NUM_MEASURED_PAGES
    yield Row("worker: each page that enters the tree, on the engine thread", page_us, "µs")
    yield Row(f"  {pages_per_s:,} of them in a second, of the thread", 1e-4 * page_us * pages_per_s, "%")
    account = CacheAccount()
    account.apply(CacheChanges(tuple(os.urandom(IDENTITY_BYTES) for _ in range(num_pages)), ()))
    writer = BatchWriter(WORKER_CODEC)
    feed = PrefixFeed(account, writer)
    feed.catch_up()
    begun = time.thread_time()
    for change in changes:
        account.apply(change)
        feed.tell_changes(b"".join(change.stored), b"".join(change.removed))
    told_us = 1e6 * (time.thread_time() - begun) / NUM_MEASURED_PAGES
    yield Row("  on the asyncio thread", told_us, "µs")
    begun = time.thread_time()
    PrefixFeed(account, writer).catch_up()
    yield Row(f"worker: all of {num_pages:,} pages for a router that joins", 1e3 * (time.thread_time() - begun), "ms")


def measure(num_workers: int, num_pages: int, pages_per_s: int, seconds: float) -> list[Row]:
    """
    Args:
        num_pages: cached at each worker.
        pages_per_s: that come at each worker; as many go.
        seconds: to measure for, twice.
    """
    return [
        *worker_rows(num_pages, pages_per_s),
        *router_rows(num_workers, num_pages, pages_per_s, seconds),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every aim is met, 1 otherwise."""
    parser = argument_parser(__doc__)
    parser.add_argument("--workers", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--pages", type=int, default=500_000, help="cached at each (%(default)s)")
    parser.add_argument("--rate", type=int, default=PAGES_PER_S, help="pages that come in a second (%(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="to measure for, twice (%(default)s)")
    arguments = parser.parse_args(argv)
    rows = measure(arguments.workers, arguments.pages, arguments.rate, arguments.seconds)
    return report(rows, "What it costs that workers tell what they have cached", arguments.json)


if __name__ == "__main__":
    sys.exit(main())
