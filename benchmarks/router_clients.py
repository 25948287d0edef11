"""Clients of the router's benchmarks. Each public coroutine is a run for serve_clients."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import grpc

from benchmarks.children import cpu_s, questions
from tandem.rpc.channel import open_channel
from tandem.rpc.loop_thread import LoopThread
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc

RUN_TIMEOUT_S = 600.0
# For the first tokens of all streams.
BEGIN_TIMEOUT_S = 60.0
# Share of the measured time.
WARM_UP = 0.2
# Time for the server to clean up.
SETTLE_S = 0.5
NUM_CONNECTIONS = 8
ENDLESS = 900_000
# 64 tokens of the benchmark's byte-level tokenizer.
PROMPT = "The quick brown fox jumps over the lazy dog, and then it rests. "


@dataclass(slots=True)
class Received:
    num_streams: int = 0
    num_tokens: int = 0
    num_messages: int = 0


class Usage(NamedTuple):
    """Counts of the measured part, and the server's CPU seconds."""

    num_tokens: int
    num_messages: int
    cpu_s: float


class FirstTokens(NamedTuple):
    """Each request's milliseconds to the first message, and phases: (start, duration) by name."""

    waits: list[float]
    phases: list[dict[str, tuple[float, float]]]


def serve_clients(pipe: Connection) -> None:
    """Answer (function of this module, *arguments) with the function's result."""
    loop_thread = LoopThread()
    loop_thread.start()
    for function, *arguments in questions(pipe):
        pipe.send(loop_thread.call(function(*arguments), RUN_TIMEOUT_S))
    loop_thread.stop()


async def stream(address: str, pid: int, num_streams: int, seconds: float) -> Usage:
    received = Received()
    async with _stubs(address) as stubs:
        streams = (
            receive(stubs[n % NUM_CONNECTIONS].Generate, request(f"stream-{n}", ENDLESS), received)
            for n in range(num_streams)
        )
        return await _measure(streams, received, num_streams, pid, seconds)


async def stream_http(address: str, pid: int, num_streams: int, seconds: float) -> Usage:
    received = Received()
    streams = (_receive_http(address, received) for _ in range(num_streams))
    return await _measure(streams, received, num_streams, pid, seconds)


async def requests(address: str, pid: int, num_requests: int, num_at_once: int, num_tokens: int) -> Usage:
    """Raises RuntimeError if tokens are missing."""
    numbers, received, start_s = iter(range(num_requests)), Received(), cpu_s(pid)

    async def one_after_the_other(stub: Any) -> None:
        for n in numbers:
            await receive(stub.Generate, request(f"request-{n}", num_tokens), received)

    async with _stubs(address) as stubs:
        await asyncio.gather(*(one_after_the_other(stubs[n % NUM_CONNECTIONS]) for n in range(num_at_once)))
    if received.num_tokens != num_requests * num_tokens:
        raise RuntimeError(f"{received.num_tokens} tokens arrived, expected {num_requests * num_tokens}")
    return Usage(received.num_tokens, received.num_messages, cpu_s(pid) - start_s)


async def first_tokens(addresses: Sequence[str], num_requests: int, num_tokens: int) -> list[FirstTokens]:
    results = [FirstTokens([], []) for _ in addresses]
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(open_channel(address)) for address in addresses]
        stubs: list[Any] = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]
        for n in range(num_requests):
            for stub, result in zip(stubs, results, strict=True):
                start = time.perf_counter()
                call = stub.Generate(request(f"one-{n}", num_tokens))
                response = await call.read()
                result.waits.append((time.perf_counter() - start) * 1e3)
                while response is not grpc.aio.EOF:
                    last, response = response, await call.read()
                result.phases.append({p.name: (p.start_ms, p.duration_ms) for p in last.phases})
    return results


async def _measure(
    streams: Iterable[Coroutine[Any, Any, None]], received: Received, num_streams: int, pid: int, seconds: float
) -> Usage:
    """Start endless streams, measure them after their first tokens, and cut them."""
    tasks = [asyncio.create_task(one) for one in streams]
    try:
        async with asyncio.timeout(BEGIN_TIMEOUT_S):
            while received.num_streams < num_streams:
                await asyncio.sleep(0.05)
                _check_running(tasks)
        await asyncio.sleep(WARM_UP * seconds)
        num_tokens, num_messages, start_s = received.num_tokens, received.num_messages, cpu_s(pid)
        await asyncio.sleep(seconds)
        usage = Usage(received.num_tokens - num_tokens, received.num_messages - num_messages, cpu_s(pid) - start_s)
        _check_running(tasks)
        return usage
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(SETTLE_S)


def _check_running(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            raise RuntimeError("a stream ended before it was cut") from task.exception()


@asynccontextmanager
async def _stubs(address: str) -> AsyncIterator[list[Any]]:
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(open_channel(address)) for _ in range(NUM_CONNECTIONS)]
        yield [inference_pb2_grpc.InferenceStub(channel) for channel in channels]


def request(request_id: str, num_tokens: int) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=num_tokens)
    return pb.GenerateRequest(request_id=request_id, text=PROMPT, sampling=sampling)


async def receive(call: Callable[[pb.GenerateRequest], Any], sent: pb.GenerateRequest, received: Received) -> None:
    is_new = True
    async for response in call(sent):
        received.num_streams += is_new
        received.num_tokens += len(response.token_ids)
        received.num_messages += 1
        is_new = False


async def _receive_http(address: str, received: Received) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": ENDLESS, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection(*address.split(":"))
    try:
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        is_new = True
        async for line in reader:
            if line.startswith(b"data: {"):
                text = json.loads(line[len("data: ") :])["choices"][0]["text"]
                received.num_streams += is_new
                # A token has one space.
                received.num_tokens += text.count(" ")
                received.num_messages += 1
                is_new = False
    finally:
        writer.close()
