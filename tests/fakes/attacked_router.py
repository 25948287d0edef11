"""A router in its own process, so that its memory is measured apart from its clients'.

A second process runs a client that measures the longest gap of its stream.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import grpc
import psutil

from tandem.messages import Abort, Embedded, Finished, FirstToken, Prefill, TokenEvent, Tokens
from tandem.router.config import RouterConfig
from tandem.router.process import RouterAddresses, RouterProcess
from tandem.v1 import inference_pb2 as pb
from tests.fakes.scripted_worker import ScriptedWorker

KEY = "right"
STEP_S = 0.01
TIMEOUT_S = 60.0
GENERATE = "/tandem.v1.Inference/Generate"
# Longer than any test.
NEVER_S = 3600.0


class AttackedRouter:
    """
    Attributes:
        pid: the router process's id.
    """

    def __init__(self, addresses: RouterAddresses, pid: int) -> None:
        self.addresses = addresses
        self.pid = pid
        self._resident = psutil.Process(pid).memory_info

    def resident_bytes(self) -> int:
        return self._resident().rss

    @contextmanager
    def watched(self, interval_s: float = 0.02) -> Iterator[Callable[[], int]]:
        """Sample memory every `interval_s` seconds; yield a function that returns the largest growth in bytes."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_watch_memory, args=(theirs, self.pid, interval_s), daemon=True)
        process.start()
        theirs.close()
        ours.recv()
        most: list[int] = []

        def growth() -> int:
            return most[0]

        try:
            yield growth
        finally:
            ours.send(None)
            most.append(ours.recv())
            process.join(TIMEOUT_S)

    @contextmanager
    def bystander(self, key: str = KEY) -> Iterator[Callable[[], float]]:
        """Run a client process with a token every STEP_S; yield a function that returns its longest gap in seconds."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_stream, args=(theirs, self.addresses.grpc, key), daemon=True)
        process.start()
        theirs.close()
        ours.recv()
        longest: list[float] = []
        try:
            yield lambda: longest[0]
        finally:
            ours.send(None)
            longest.append(ours.recv())
            process.join(TIMEOUT_S)


@contextmanager
def attacked_router(model_dir: str, **config: Any) -> Iterator[AttackedRouter]:
    """Start a router in its own process. `config` holds further fields of RouterConfig."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, model_dir, config), daemon=True)
    process.start()
    theirs.close()
    try:
        addresses = ours.recv()
        assert process.pid is not None
        yield AttackedRouter(addresses, process.pid)
    finally:
        ours.close()
        process.join(TIMEOUT_S)
        if process.is_alive():
            process.kill()


def _serve(pipe: Connection, model_dir: str, config: dict[str, Any]) -> None:
    settings: dict[str, Any] = {
        "grpc_port": 0,
        "http_port": 0,
        "api_keys": (KEY,),
        "heartbeat_timeout_s": NEVER_S,
        "stall_timeout_s": NEVER_S,
        **config,
    }
    process = RouterProcess(RouterConfig(model_dir, "fake", 10**6, **settings))
    addresses = process.start()
    workers = ScriptedWorkers(process)
    process._loop_thread.call(workers.start(), TIMEOUT_S)
    pipe.send(addresses)
    try:
        pipe.recv()
    except EOFError:
        process.stop()


class ScriptedWorkers:
    """A prefill and a decode worker that send each running request a token every STEP_S."""

    def __init__(self, process: RouterProcess) -> None:
        assert process._router is not None
        self._router = process._router
        self._running: dict[tuple[str, int], int] = {}
        self._max_tokens: dict[tuple[str, int], int] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._p = ScriptedWorker(self._router, "p", "prefill", num_pages=10**6)
        self._d = ScriptedWorker(self._router, "d", "decode", num_pages=10**6)
        self._p.link_to("d")
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            for key, index in list(self._running.items()):
                self._d.say(Tokens((TokenEvent(*key, index, (1,)),)))
                self._running[key] = index + 1
                if index + 1 >= self._max_tokens[key]:
                    self._d.say(Finished(*key, "length", index + 1, 0, 1))
                    del self._running[key]
            for message in self._p.sent:
                if isinstance(message, Prefill) and message.embedding is not None:
                    self._p.say(Embedded(message.request_id, message.attempt, bytes(4), 0, 1))
                elif isinstance(message, Prefill):
                    key = message.request_id, message.attempt
                    self._p.say(FirstToken(*key, 0, 1, "", 0, 1))
                    self._running[key] = 1
                    self._max_tokens[key] = message.sampling.max_tokens
            for message in self._d.sent:
                if isinstance(message, Abort):
                    self._running.pop((message.request_id, message.attempt), None)
            self._p.sent.clear()
            self._d.sent.clear()


def _watch_memory(pipe: Connection, pid: int, interval_s: float) -> None:
    memory = psutil.Process(pid).memory_info
    before = most = memory().rss
    pipe.send(None)
    while not pipe.poll(interval_s):
        most = max(most, memory().rss)
    pipe.send(max(most, memory().rss) - before)


def _stream(pipe: Connection, address: str, key: str) -> None:
    request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=900_000, ignore_eos=True))
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_stream(GENERATE, pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString)
        responses = call(request, metadata=(("authorization", f"Bearer {key}"),))
        next(responses)
        pipe.send(None)
        longest, last = 0.0, time.monotonic()
        for _ in responses:
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            if pipe.poll():
                break
        pipe.send(longest)
