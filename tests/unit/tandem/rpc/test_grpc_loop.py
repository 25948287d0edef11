"""The loop of a process that sends many messages over gRPC."""

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc

from tandem.rpc import grpc_loop
from tandem.rpc.channel import bind, new_server, open_channel
from tandem.rpc.grpc_loop import GrpcLoop
from tandem.rpc.loop_thread import LoopThread

NUM_STREAMS = 64
NUM_MESSAGES = 20


class Streams(grpc.GenericRpcHandler):
    """All streams get their next message at once, as soon as all have taken the previous one."""

    def __init__(self) -> None:
        self._steps = asyncio.Barrier(NUM_STREAMS)

    def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_stream_rpc_method_handler(self._answer)

    async def _answer(self, request: bytes, _: object) -> AsyncIterator[bytes]:
        for number in range(NUM_MESSAGES):
            await self._steps.wait()
            yield request + bytes([number])


async def serve_streams() -> tuple[list[list[bytes]], set[int]]:
    """Return each client's messages, and the scheduling policies of gRPC's poller threads."""
    server = new_server()
    server.add_generic_rpc_handlers((Streams(),))
    address = bind(server, "127.0.0.1", 0)
    await server.start()

    async def read(call: Any) -> list[bytes]:
        return [message async for message in call]

    async with open_channel(address) as channel:
        ask = channel.unary_stream("/any/method")
        received = await asyncio.gather(*(read(ask(bytes([n]))) for n in range(NUM_STREAMS)))
        # The thread ends with gRPC's last server and channel.
        pollers = [thread for thread in threading.enumerate() if "_poll_wrapper" in thread.name]
        policies = {os.sched_getscheduler(thread.native_id or 0) for thread in pollers}
    await server.stop(0)
    return received, policies


def test_messages_arrive_in_order_without_busy_polling() -> None:
    loop_thread = LoopThread(GrpcLoop)
    loop_thread.start()
    try:
        received, policies = loop_thread.call(serve_streams(), 30)
    finally:
        loop_thread.stop()
    assert policies == {os.SCHED_BATCH}
    assert received == [[bytes([n, number]) for number in range(NUM_MESSAGES)] for n in range(NUM_STREAMS)]


class PollerCompletionQueue:
    """The loop's view of gRPC's class. An event is the loop it belongs to."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.handled: list[str] = []
        self.num_calls = 0

    def handle_events(self, _: object) -> None:
        self.num_calls += 1
        while self.events:
            event = self.events.pop(0)
            if event == "closed":
                raise RuntimeError("Event loop is closed")
            self.handled.append(event)


def handle_batches(queue: PollerCompletionQueue, batches: list[list[str]]) -> None:
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    loop = GrpcLoop()

    async def wait() -> None:
        loop.add_reader(reader, grpc_loop.partial(queue.handle_events, loop))
        for events in batches:
            queue.events += events
            writer.send(b"1" * len(events))
            await asyncio.sleep(0.05)
        loop.remove_reader(reader)

    loop.run_until_complete(wait())
    loop.close()
    for end in (reader, writer):
        end.close()


def test_pending_events_are_handled_together() -> None:
    queue = PollerCompletionQueue()
    handle_batches(queue, [["open"] * 100] * 2)
    assert len(queue.handled) == 200
    assert queue.num_calls == 2


def test_event_of_a_closed_loop_does_not_block_later_events() -> None:
    queue = PollerCompletionQueue()
    handle_batches(queue, [["open", "closed", "closed", "open"], ["closed"], ["open"]])
    assert queue.handled == ["open"] * 3
    assert not queue.events
