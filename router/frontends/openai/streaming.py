"""Serving several generations for one HTTP request, and sending answers as server-sent events."""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import ExitStack, aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tandem.router.errors import RequestError
from tandem.router.frontends.generation import Generation, Piece
from tandem.router.frontends.openai.errors import error_object

T = TypeVar("T")

# A client that reads nothing for this long counts as gone.
READ_TIMEOUT_S = 120.0
DONE = b"data: [DONE]\n\n"
# Interval of comments in a silent stream: they let a client notice a stuck router.
KEEPALIVE_S = 10.0
# Without an empty line after it: some clients would take that for an event.
COMMENT = b":\n"

# Made once: `json.dumps` makes an encoder per call.
to_json = json.JSONEncoder(separators=(",", ":")).encode

# An event's id or "", and its content as JSON.
Event = tuple[str, str]


class ClientGoneError(Exception):
    """The client left before its answer."""


async def pieces_of(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Piece]]:
    """Yields each piece with its generation's index. Closing it, or a failure of one, ends all.

    Raises as Generation.__enter__ and next_piece.
    """
    with ExitStack() as entered:
        for generation in generations:
            entered.enter_context(generation)
        if len(generations) == 1:
            while (piece := await generations[0].next_piece()) is not None:
                yield 0, piece
            return
        # Length one: output for a slow client waits in the generations, where it is merged.
        queue: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue(1)

        async def forward(index: int, generation: Generation) -> None:
            try:
                while (piece := await generation.next_piece()) is not None:
                    await queue.put((index, piece))
                await queue.put((index, None))
            except Exception as error:
                await queue.put((index, error))

        tasks = [asyncio.create_task(forward(i, g)) for i, g in enumerate(generations)]
        try:
            num_running = len(tasks)
            while num_running:
                index, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_running -= 1
                else:
                    yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Cancels `work` if the client leaves first. Raises ClientGoneError."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, ended by [DONE] or by an error. Comments fill long gaps."""

    media_type = "text/event-stream"
    comment, done = COMMENT, DONE

    def __init__(self, events: AsyncGenerator[Event], first: Event | None) -> None:
        """Args: first: taken from `events` already; None: there are none."""
        # A proxy that compresses or buffers an event stream holds its events until the end.
        super().__init__(headers={"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._first = first
        self._sending_since = math.inf
        self._sent_at = 0.0
        self._comment: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            try:
                send_direct = scope.get("state", {}).get("send", send)
                await unless_client_leaves(self._or_stalled(receive, send_direct), self._send(send, send_direct))
            except ClientGoneError:
                return
            finally:
                if self._comment is not None:
                    self._comment.cancel()

    def _or_stalled(self, receive: Receive, send: Send) -> Receive:
        """Watches the stream: a timeout around each send would add a third to its cost."""
        loop = asyncio.get_running_loop()

        async def receive_or_stalled() -> Message:
            while True:
                silent_s = loop.time() - self._sent_at
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(KEEPALIVE_S - silent_s if silent_s < KEEPALIVE_S else KEEPALIVE_S):
                        return await receive()
                if loop.time() - self._sending_since >= READ_TIMEOUT_S:
                    return {"type": "http.disconnect"}
                if self._sending_since == math.inf and loop.time() - self._sent_at >= KEEPALIVE_S:
                    self._comment = asyncio.create_task(self._send_body(send, self.comment))

        return receive_or_stalled

    async def _send(self, send: Send, send_direct: Send) -> None:
        """Args: send_direct: the server's own, for everything after the start."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._first is not None:
            await self._send_body(send_direct, self.encode(*self._first))
        try:
            async for event in self._events:
                if self._comment is not None:
                    await self._comment
                    self._comment = None
                await self._send_body(send_direct, self.encode(*event))
        except RequestError as error:
            await self._send_last(send_direct, self.encode("", to_json(error_object(error))))
            return
        await self._send_last(send_direct, self.done)

    async def _send_last(self, send: Send, body: bytes) -> None:
        if self._comment is not None:
            await self._comment
        await self._send_body(send, body, more=False)

    async def _send_body(self, send: Send, body: bytes, *, more: bool = True) -> None:
        self._sending_since = self._sent_at = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending_since = math.inf

    def encode(self, event_id: str, content: str) -> bytes:
        line = f"id: {event_id}\n" if event_id else ""
        return f"{line}data: {content}\n\n".encode()


async def begin_stream(
    events: AsyncGenerator[Event], receive: Receive, stream: type[EventStream] = EventStream
) -> EventStream:
    """Waits for the first event, so that an earlier error has its own status. Raises RequestError, ClientGoneError."""
    try:
        # A stream resumed after its last event is empty.
        first = await unless_client_leaves(receive, anext(events, None))
    except BaseException:
        await events.aclose()
        raise
    return stream(events, first)
