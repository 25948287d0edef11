"""Scripted prefill and decode workers with real control streams to a router."""

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.children import START_TIMEOUT_S, questions
from benchmarks.router_model import output_token
from tandem.lifecycle import (
    COMMITTED,
    DECODE_STARTED,
    FIRST_TOKEN,
    LAST_TOKEN,
    LEASE_GRANTED,
    PREFILL_RECEIVED,
    PREFILL_STARTED,
    SECOND_TOKEN,
    SHIP_STARTED,
    now_ns,
)
from tandem.messages import (
    PROTOCOL_VERSION,
    Abort,
    ClockProbe,
    ClockReply,
    Finished,
    FirstToken,
    Heartbeat,
    Hello,
    LinkState,
    Moment,
    PageFormat,
    Prefill,
    Progress,
    TokenEvent,
    Tokens,
    WorkerMessage,
)
from tandem.rpc.channel import open_channel
from tandem.rpc.codec import ROUTER_CODEC, WORKER_CODEC
from tandem.rpc.loop_thread import LoopThread
from tandem.v1 import worker_pb2_grpc

HEARTBEAT_INTERVAL_S = 0.25
PAGE_FORMAT = PageFormat("none", 128, "none")
NUM_PAGES = 1_000_000
PAGE_SIZE = 16
PREFILL_ID, DECODE_ID, DECODE_LIFE = "prefill", "decode", "decode-life"


def serve_workers(pipe: Connection, address: str, tells_moments: bool = True) -> None:
    _serve(pipe, [DecodeWorker()], [address], tells_moments)


def serve_pair(pipe: Connection, addresses: Sequence[str], number: int) -> None:
    """Run a pair for several routers; answer once they joined, then take step intervals."""
    _serve(pipe, [DecodeWorker(str(number)) for _ in addresses], addresses, True, str(number))


def _serve(
    pipe: Connection, decodes: Sequence["DecodeWorker"], addresses: Sequence[str], tells_moments: bool, number: str = ""
) -> None:
    loop_thread = LoopThread()
    loop_thread.start()
    for address, decode in zip(addresses, decodes, strict=True):
        for worker in (decode, PrefillWorker(decode, number)):
            worker.tells_moments = tells_moments
            loop_thread.call(worker.join(address), START_TIMEOUT_S)
    pipe.send(None)
    for step_interval_s in questions(pipe):
        for decode in decodes:
            decode.step_interval_s = step_interval_s
        pipe.send(None)
    loop_thread.stop()


class ScriptedWorker(ABC):
    def __init__(self, worker_id: str, incarnation: str, role: str) -> None:
        self._hello = Hello(
            PROTOCOL_VERSION, worker_id, incarnation, role, "none", "nowhere:1", 1, PAGE_FORMAT, NUM_PAGES, PAGE_SIZE
        )
        self.tells_moments = True
        self._joined = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        # Unanswered clock probes: the router's time and our own.
        self._probes: list[tuple[int, int]] = []

    async def join(self, address: str) -> None:
        self._task = asyncio.create_task(self._run(address))
        await self._joined.wait()

    @abstractmethod
    def receive(self, message: Any) -> None: ...

    @abstractmethod
    async def ready(self) -> None:
        """Wait for messages to send."""

    @abstractmethod
    def step(self) -> list[WorkerMessage]:
        """Return the messages to send."""

    async def _run(self, address: str) -> None:
        async with open_channel(address) as channel:
            async for batch in worker_pb2_grpc.ClusterStub(channel).Control(self._batches()):
                self._joined.set()
                received_ns = now_ns()
                for message in ROUTER_CODEC.decode(batch):
                    if isinstance(message, ClockProbe):
                        self._probes.append((message.sent_ns, received_ns))
                    else:
                        self.receive(message)

    async def _batches(self) -> AsyncIterator[Any]:
        """gRPC takes the next batch when it has sent the last one."""
        yield WORKER_CODEC.encode([self._hello])
        num_beats, beat_at = 0, 0.0
        while True:
            messages: list[WorkerMessage] = []
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_INTERVAL_S):
                    await self.ready()
                messages = self.step()
            if time.monotonic() >= beat_at:
                beat_at, num_beats = time.monotonic() + HEARTBEAT_INTERVAL_S, num_beats + 1
                messages.append(Heartbeat(num_beats))
            if self._probes:
                probes, self._probes = self._probes, []
                messages += [ClockReply(sent_ns, received_ns, now_ns()) for sent_ns, received_ns in probes]
            if messages:
                yield WORKER_CODEC.encode(messages)


@dataclass(eq=False, slots=True)
class Running:
    """A request at the decode worker. Attributes: since: arrival, in nanoseconds."""

    request_id: str
    attempt: int
    max_tokens: int
    since: int
    num_tokens: int = 1


class DecodeWorker(ScriptedWorker):
    """Adds a token to every request at each step.

    Attributes:
        step_interval_s: 0: as fast as gRPC takes the messages.
    """

    def __init__(self, number: str = "") -> None:
        super().__init__(DECODE_ID + number, DECODE_LIFE + number, "decode")
        self.step_interval_s = 0.0
        self._running: dict[str, Running] = {}
        self._wake = asyncio.Event()
        self._step_at = 0.0

    def start_decoding(self, request: Prefill) -> None:
        running = Running(request.request_id, request.attempt, request.sampling.max_tokens, now_ns())
        self._running[request.request_id] = running
        self._wake.set()

    def receive(self, message: Any) -> None:
        if isinstance(message, Abort):
            self._running.pop(message.request_id, None)

    async def ready(self) -> None:
        await self._wake.wait()
        await asyncio.sleep(self._step_at - time.monotonic())

    def step(self) -> list[WorkerMessage]:
        self._step_at = max(self._step_at, time.monotonic() - self.step_interval_s) + self.step_interval_s
        events, progress, finished = [], [], []
        for running in list(self._running.values()):
            token_ids = (output_token(running.num_tokens),)
            events.append(TokenEvent(running.request_id, running.attempt, running.num_tokens, token_ids))
            running.num_tokens += 1
            if running.num_tokens == 2 and self.tells_moments:
                progress.append(_progress(running))
            if running.num_tokens == running.max_tokens:
                finished.append(_finished(running, self.tells_moments))
                del self._running[running.request_id]
        if not self._running:
            self._wake.clear()
        return [*progress, Tokens(tuple(events)), *finished]


class PrefillWorker(ScriptedWorker):
    """Answers every request with a first token at once."""

    def __init__(self, decode: DecodeWorker, number: str = "") -> None:
        super().__init__(PREFILL_ID + number, "prefill-life" + number, "prefill")
        self._decode = decode
        self._outbox: list[WorkerMessage] = [LinkState(DECODE_ID + number, DECODE_LIFE + number, up=True)]
        self._wake = asyncio.Event()
        self._wake.set()

    def receive(self, message: Any) -> None:
        if isinstance(message, Prefill):
            names = (PREFILL_RECEIVED, PREFILL_STARTED, FIRST_TOKEN) if self.tells_moments else ()
            moments = tuple(Moment(name, now_ns()) for name in names)
            first = FirstToken(message.request_id, message.attempt, 0, output_token(0), "", 0, 1, moments)
            self._outbox.append(first)
            self._wake.set()
            self._decode.start_decoding(message)

    async def ready(self) -> None:
        await self._wake.wait()

    def step(self) -> list[WorkerMessage]:
        self._wake.clear()
        messages, self._outbox = self._outbox, []
        return messages


def _progress(running: Running) -> Progress:
    started = (LEASE_GRANTED, SHIP_STARTED, COMMITTED, DECODE_STARTED, SECOND_TOKEN)
    return Progress(running.request_id, running.attempt, tuple(Moment(name, running.since) for name in started))


def _finished(running: Running, tells_moments: bool) -> Finished:
    moments = (Moment(LAST_TOKEN, now_ns()),) if tells_moments else ()
    return Finished(running.request_id, running.attempt, "length", running.num_tokens, 0, 1, moments)
