"""A server with made-up tokens at known times, over gRPC and OpenAI's HTTP API."""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import grpc

from tandem.rpc.grpc_loop import GrpcLoop
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc

MODEL = "scripted"
# Resolution of timers; the rest of a wait polls the clock.
SPIN_S = 0.0015
CACHED_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Script:
    """
    Attributes:
        ttft_s: seconds from a request's arrival to its first chunk.
        gaps_s: seconds between chunks, repeated in a cycle.
        is_exact: busy-wait for the last milliseconds, which costs a core for a few streams.
    """

    ttft_s: float = 0.05
    gaps_s: tuple[float, ...] = (0.01,)
    tokens_per_chunk: int = 1
    is_exact: bool = True


@dataclass(slots=True)
class Sent:
    """Arrival of one request and of its chunks, on the monotonic clock."""

    received: float
    times: list[float]


class ScriptedServer(inference_pb2_grpc.InferenceServicer):
    """Attributes: sent: one record per request, in order of arrival."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.sent: list[Sent] = []

    async def start(self, grpc_port: int = 0, http_port: int = 0) -> tuple[int, int]:
        """Listen on loopback; return both ports."""
        self._grpc = grpc.aio.server()
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self._grpc)
        grpc_port = self._grpc.add_insecure_port(f"127.0.0.1:{grpc_port}")
        await self._grpc.start()
        self._http = await asyncio.start_server(self._serve_http, "127.0.0.1", http_port, limit=2**24)
        return grpc_port, self._http.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._http.close()
        await self._grpc.stop(0)

    async def _chunks(self, num_tokens: int) -> AsyncIterator[list[int]]:
        sent = Sent(time.monotonic(), [])
        self.sent.append(sent)
        script, due = self._script, sent.received + self._script.ttft_s
        for number, first in enumerate(range(0, num_tokens, script.tokens_per_chunk)):
            await self._until(due)
            sent.times.append(time.monotonic())
            yield list(range(first, min(first + script.tokens_per_chunk, num_tokens)))
            due += script.gaps_s[number % len(script.gaps_s)]

    async def _until(self, moment: float) -> None:
        # Yield to the other streams even when late, so that two chunks of a stream never leave together.
        await asyncio.sleep(0)
        while (left := moment - time.monotonic()) > 0:
            if self._script.is_exact:
                await asyncio.sleep(left - SPIN_S if left > SPIN_S else 0)
            else:
                await asyncio.sleep(left)

    # --- gRPC

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        num_tokens = request.sampling.max_tokens
        index = 0
        async for token_ids in self._chunks(num_tokens):
            response = pb.GenerateResponse(index=index, token_ids=token_ids, text=" hi" * len(token_ids))
            index += len(token_ids)
            if index == num_tokens:
                response.finish_reason = pb.FINISH_REASON_LENGTH
                response.usage.prompt_tokens = len(request.token_ids.ids)
                response.usage.cached_tokens = CACHED_TOKENS
                response.usage.completion_tokens = num_tokens
            yield response

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return pb.ServerInfo(version="scripted", model=MODEL, ready=True)

    # --- HTTP

    async def _serve_http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
                )
                body = json.loads(await reader.readexactly(length) or b"{}")
                if head.startswith(b"POST"):
                    await self._answer(writer, body, is_chat=b"/chat/" in head.split(b"\r\n")[0])
                else:
                    _respond(writer, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, body: dict[str, Any], *, is_chat: bool) -> None:
        num_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        options = body.get("stream_options") or {}
        prompt = body.get("prompt") or ""
        usage = {
            "prompt_tokens": len(prompt.split() if isinstance(prompt, str) else prompt),
            "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
        }
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        common = {"id": "scripted", "object": kind, "created": 0, "model": MODEL}
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head)
        if is_chat:
            _event(writer, common | {"choices": [_choice(is_chat, "", None, role="assistant")]})
        so_far = 0
        async for token_ids in self._chunks(num_tokens):
            so_far += len(token_ids)
            reason = "length" if so_far == num_tokens else None
            event = common | {"choices": [_choice(is_chat, " hi" * len(token_ids), reason)]}
            counted = usage | {"completion_tokens": so_far, "total_tokens": so_far + usage["prompt_tokens"]}  # type: ignore[operator]
            if options.get("continuous_usage_stats"):
                event["usage"] = counted
            _event(writer, event)
        if options.get("include_usage"):
            _event(writer, common | {"choices": [], "usage": counted})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def _choice(is_chat: bool, text: str, reason: str | None, **delta: str) -> dict[str, Any]:
    content = {"delta": {**delta, "content": text}} if is_chat else {"text": text}
    return {"index": 0, **content, "logprobs": None, "finish_reason": reason}


def _event(writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
    _chunk(writer, b"data: " + json.dumps(content).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _respond(writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


def serve_scripted(pipe: Connection, script: Script) -> None:
    """Target of a benchmarks.children.Child: sends both ports, then answers questions with the latest requests."""
    with asyncio.Runner(loop_factory=GrpcLoop) as runner:
        runner.run(_serve(pipe, script))


async def _serve(pipe: Connection, script: Script) -> None:
    server = ScriptedServer(script)
    pipe.send(await server.start())
    over = asyncio.Event()

    def hear() -> None:
        try:
            pipe.recv()
        except EOFError:
            over.set()
            return
        pipe.send([(sent.received, sent.times) for sent in server.sent])
        server.sent.clear()

    loop = asyncio.get_running_loop()
    loop.add_reader(pipe.fileno(), hear)
    # The event loop made the pipe non-blocking, and an answer for many requests exceeds its buffer.
    os.set_blocking(pipe.fileno(), True)
    await over.wait()
    loop.remove_reader(pipe.fileno())
    await server.stop()
