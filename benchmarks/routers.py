"""Measures tokens per second through 1, 2, 4 and 8 routers in front of the same scripted workers.

Clients use `connections` to the shared port, which the kernel deals out, or a few of our own `clients`, which spread
their calls themselves. Each stream has a token every five milliseconds, or as often as possible.

With `--step 0` a worker's message holds one request or all, and a token's cost varies by a factor of two between runs.
Routers, pairs of workers and client processes need a core each.
"""

import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.children import START_TIMEOUT_S, Child, cpu_s, questions
from benchmarks.router_clients import ENDLESS, Received, receive, request
from benchmarks.router_model import MAX_MODEL_LEN, MODEL_NAME, write_model_dir
from benchmarks.router_servers import serve_raw
from benchmarks.router_workers import serve_pair
from benchmarks.rows import Row, argument_parser, report
from tandem import logs
from tandem.client import AsyncTandemClient
from tandem.config import LogConfig
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.host.ports import ReservedPorts
from tandem.router.config import RouterConfig
from tandem.router.process import RouterProcess
from tandem.rpc.channel import open_channel
from tandem.rpc.loop_thread import LoopThread
from tandem.v1 import inference_pb2_grpc

NUM_ROUTERS = (1, 2, 4, 8)
NUM_STREAMS = (512, 2048)
NUM_CONNECTIONS = 512
NUM_CLIENTS = 16
MIN_SPEED_UP_OF_4 = 3.4
MIN_TOKENS_OF_4 = 120_000
BEGIN_TIMEOUT_S = 120.0
WARM_UP_S = 0.5
BEGIN_STEP_INTERVAL_S = 0.5


def serve_replica(pipe: Connection, config: RouterConfig, log_dir: str) -> None:
    """Run one router: send its addresses; None opens the shared ports; other questions ask for its request count."""
    logs.configure(config.router_id, LogConfig(directory=log_dir))
    process = RouterProcess(config)
    pipe.send(process.start())
    for question in questions(pipe):
        if question is None:
            process.open_shared_ports()
            pipe.send(None)
        else:
            assert process._router is not None
            pipe.send(process._router.num_requests)
    process.stop()


def serve_load(pipe: Connection, addresses: Sequence[str]) -> None:
    """Run streams: ("begin", way, number of streams, number of connections or clients) waits for all first tokens;
    a number of seconds is answered by the tokens and messages; None ends the streams.
    """
    loop_thread = LoopThread()
    loop_thread.start()
    load = Load(addresses)
    for question in questions(pipe):
        match question:
            case ("begin", way, num_streams, num_shared_by):
                loop_thread.call(load.begin(way, num_streams, num_shared_by), BEGIN_TIMEOUT_S)
                pipe.send(None)
            case None:
                loop_thread.call(load.end(), BEGIN_TIMEOUT_S)
                pipe.send(None)
            case seconds:
                pipe.send(loop_thread.call(load.count(seconds), BEGIN_TIMEOUT_S))
    loop_thread.stop()


class Load:
    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._received = Received()
        self._tasks: list[asyncio.Task[None]] = []
        self._open = AsyncExitStack()

    async def begin(self, way: str, num_streams: int, num_shared_by: int) -> None:
        self._received, self._open = Received(), AsyncExitStack()
        addresses = itertools.islice(itertools.cycle(self._addresses), num_shared_by)
        shared = [await self._open.enter_async_context(_opened(way, address)) for address in addresses]
        self._tasks = [
            asyncio.create_task(receive(shared[n % num_shared_by], request(f"{n}", ENDLESS), self._received))
            for n in range(num_streams)
        ]
        while self._received.num_streams < num_streams:
            await asyncio.sleep(0.05)
            self._check_running()

    async def count(self, seconds: float) -> tuple[int, int]:
        await asyncio.sleep(WARM_UP_S)
        num_tokens, num_messages = self._received.num_tokens, self._received.num_messages
        await asyncio.sleep(seconds)
        self._check_running()
        return self._received.num_tokens - num_tokens, self._received.num_messages - num_messages

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._open.aclose()

    def _check_running(self) -> None:
        for task in self._tasks:
            if task.done():
                raise RuntimeError("a stream ended before it was cut") from task.exception()


@asynccontextmanager
async def _opened(way: str, address: str) -> AsyncIterator[Any]:
    if way == "connections":
        async with open_channel(address) as channel:
            yield inference_pb2_grpc.InferenceStub(channel).Generate
    else:
        async with AsyncTandemClient(address) as client:
            yield client.generate


def measure(num_routers: int, args: Any, model_dir: str, log_dir: str) -> list[Row]:
    rows = []
    with ExitStack() as stack:
        reserved = ReservedPorts()
        stack.callback(reserved.close)
        cluster = ClusterConfig("benchmark", num_routers=num_routers, grpc_port=0, http_port=0)
        ports = reserved.reserve_all(cluster)
        config = RouterConfig(model_dir, MODEL_NAME, MAX_MODEL_LEN, max_queued_requests=4096)
        routers = [stack.enter_context(Child(serve_replica, own, log_dir)) for own in ports.configs(config)]
        for router in routers:
            router.answer()
        addresses = [own.cluster for own in ports.routers.values()]
        pairs = [stack.enter_context(Child(serve_pair, addresses, number)) for number in range(args.pairs)]
        for pair in pairs:
            pair.answer()
        for router in routers:
            router.ask(None)
        loads = [stack.enter_context(Child(serve_load, [ports.shared.grpc])) for _ in range(args.clients)]
        for num_streams in NUM_STREAMS:
            for way, num_shared_by in (("connections", NUM_CONNECTIONS), ("clients", NUM_CLIENTS)):
                with _streams(pairs, loads, way, num_streams, num_shared_by, args.step):
                    counted = _count(routers, loads, args.seconds)
                    num_each = ", ".join(map(str, _ask_all(routers, "load")))
                name = f"{num_routers} routers, {num_streams} streams, {num_shared_by} {way}"
                print(f"{name}: {counted}; each router's streams: {num_each}", flush=True)
                is_asked_enough = not args.step or num_streams / args.step * 1e3 > MIN_TOKENS_OF_4
                aim = MIN_TOKENS_OF_4 if num_routers == 4 and is_asked_enough else None
                rows.append(Row(name, counted.rate, "tokens/s", aim))
    return rows


def measure_raw(num_servers: int, args: Any) -> list[Row]:
    """Measure the smaller number of streams from bare servers."""
    num_streams = NUM_STREAMS[0]
    with ExitStack() as stack:
        servers = [stack.enter_context(Child(serve_raw)) for _ in range(num_servers)]
        addresses = [server.answer() for server in servers]
        own_addresses = [[*addresses[n % num_servers :], *addresses[: n % num_servers]] for n in range(args.clients)]
        loads = [stack.enter_context(Child(serve_load, own)) for own in own_addresses]
        with _streams(servers, loads, "connections", num_streams, NUM_CONNECTIONS, args.step):
            counted = _count(servers, loads, args.seconds)
    name = f"{num_servers} bare servers, {num_streams} streams, {NUM_CONNECTIONS} connections"
    print(f"{name}: {counted}", flush=True)
    return [Row(name, counted.rate, "tokens/s")]


@contextmanager
def _streams(
    paced: Sequence[Child], loads: Sequence[Child], way: str, num_streams: int, num_shared_by: int, step_ms: float
) -> Iterator[None]:
    # Slow steps leave the servers time to start streams.
    _ask_all(paced, BEGIN_STEP_INTERVAL_S)
    _ask_all(loads, ("begin", way, num_streams // len(loads), max(1, num_shared_by // len(loads))))
    _ask_all(paced, step_ms / 1e3)
    yield
    _ask_all(paced, BEGIN_STEP_INTERVAL_S)
    _ask_all(loads, None)


@dataclass(frozen=True, slots=True)
class Counted:
    """Attributes: rate: tokens per second of all clients; cores: CPU cores used by each server."""

    rate: float
    tokens_per_message: float
    cores: Sequence[float]

    def __str__(self) -> str:
        cores = ", ".join(f"{used:.2f}" for used in self.cores)
        return f"{self.rate:,.0f} tokens/s; {self.tokens_per_message:.2f} tokens a message; cores of each: {cores}"


def _count(servers: Sequence[Child], loads: Sequence[Child], seconds: float) -> Counted:
    began, before = time.monotonic(), [cpu_s(server.pid) for server in servers]
    counts = _ask_all(loads, seconds)
    took = time.monotonic() - began
    cores = [(cpu_s(server.pid) - used) / took for server, used in zip(servers, before, strict=True)]
    num_tokens, num_messages = (sum(column) for column in zip(*counts, strict=True))
    return Counted(num_tokens / seconds, num_tokens / num_messages, cores)


def _ask_all(children: Sequence[Child], question: Any) -> list[Any]:
    for child in children:
        child.send(question)
    return [child.answer(BEGIN_TIMEOUT_S + START_TIMEOUT_S) for child in children]


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--routers", type=int, nargs="+", default=NUM_ROUTERS, metavar="N", help="numbers of routers")
    parser.add_argument("--pairs", type=int, default=8, metavar="N", help="worker processes (%(default)s)")
    parser.add_argument("--clients", type=int, default=16, metavar="N", help="client processes (%(default)s)")
    parser.add_argument("--step", type=float, default=5.0, metavar="MS", help="between tokens (%(default)g)")
    parser.add_argument("--raw", action="store_true", help="also measure bare gRPC servers")
    parser.add_argument("--seconds", type=float, default=3.0, help="measured time (%(default)g)")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        write_model_dir(Path(directory))
        for num_routers in args.routers:
            rows += measure(num_routers, args, directory, directory)
            if args.raw:
                rows += measure_raw(num_routers, args)
    rows += _speed_ups(rows, args.routers)
    return report(rows, "What several routers pass on", args.json)


def _speed_ups(rows: Sequence[Row], numbers: Sequence[int]) -> list[Row]:
    of = {n: [row.value for row in rows if row.name.startswith(f"{n} routers")] for n in numbers}
    if 1 not in of:
        return []
    return [
        Row(
            f"{n} routers over one",
            statistics.median(several / one for several, one in zip(of[n], of[1], strict=True)),
            "times",
            MIN_SPEED_UP_OF_4 if n == 4 else None,
        )
        for n in numbers
        if n > 1
    ]


if __name__ == "__main__":
    sys.exit(main())
