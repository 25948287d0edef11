"""HTTP connections with limits on the size, pieces and time of each request's bytes."""

import asyncio
import math
from typing import Any, Protocol

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tandem.router.frontends.openai.closing_transport import ClosingTransport, DiscardBudget
from tandem.router.frontends.openai.errors import status_response

# From the connection or its last request to the end of the next head.
HEAD_TIMEOUT_S = 30.0
MAX_HEAD_BYTES = 64 * 2**10
MAX_URL_BYTES = 8 * 2**10
MAX_HEADERS = 128
# Bytes of a request outside its body: its head, and the framing of chunks. A chunk of 64 bytes has six more.
BODY_BYTES_PER_FRAMING_BYTE = 8
# Pieces of a body, as the parser yields them: each costs about a microsecond.
MAX_PIECES = 1024
MIN_BYTES_PER_PIECE = 64
# A head's separators: ": " and the end of each line; the spaces and version of the first one, and the last line.
_NUM_BYTES_BESIDE_HEADER = 4
_NUM_BYTES_BESIDE_REQUEST = len("  HTTP/1.1\r\n\r\n")


_TOO_LARGE_HEAD = f"the request's head has more than {MAX_HEAD_BYTES} bytes"
_TOO_MUCH_FRAMING = "the request has too many bytes beside its body: send larger chunks, and nothing after the body"


class _Refused(Exception):
    """Stops the parser."""


class Keeper(Protocol):
    """Knows the open connections. A connection is idle from its beginning, from each answer to the next head, and while
    it closes."""

    def is_idle(self, connection: "BoundedProtocol") -> None: ...

    def is_busy(self, connection: "BoundedProtocol") -> None: ...

    def is_lost(self, connection: "BoundedProtocol") -> None: ...


class BoundedProtocol(HttpToolsProtocol):
    """Adds limits: uvicorn waits for a head for ever, and buffers heads and trailers of any size."""

    transport: ClosingTransport  # type: ignore[assignment]
    parser: httptools.HttpRequestParser
    _head_timer: asyncio.TimerHandle | None = None
    _refusal: tuple[int, str] | None = None
    _num_read = 0
    _num_head_bytes = 0
    _num_framing_bytes = 0
    _num_body_bytes = 0
    _num_pieces = 0

    def __init__(self, budget: DiscardBudget, keeper: Keeper, *args: Any, **kwargs: Any) -> None:
        """Args: budget: for bytes of refused requests."""
        super().__init__(*args, **kwargs)
        self._budget = budget
        self._keeper = keeper

    @property
    def was_made(self) -> bool:
        return self.transport is not None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(ClosingTransport(transport, self.loop, self._budget))  # type: ignore[arg-type]
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        self.transport.lost()
        super().connection_lost(exc)
        self._keeper.is_lost(self)

    def eof_received(self) -> None:
        # The loop closes the connection itself, without a limit on the time that unread answers take.
        self.transport.close_at_once()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            self.transport.discard(len(data))
            return
        self._unset_keepalive_if_required()
        self._num_read = len(data)
        self._num_framing_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            if not self.transport.is_closing():
                self._refuse(*(self._refusal or (400, "these bytes are no HTTP request")))
            return
        if self._num_framing_bytes > MAX_HEAD_BYTES + self._num_body_bytes // BODY_BYTES_PER_FRAMING_BYTE:
            has_head = self._head_timer is None
            self._refuse(400 if has_head else 431, _TOO_MUCH_FRAMING if has_head else _TOO_LARGE_HEAD)
        elif self._head_timer is None and not self._is_serving() and not self.transport.is_closing():
            # Bytes that begin no request: uvicorn's timer for the next head was stopped.
            self._await_head()

    def on_message_begin(self) -> None:
        if self._is_serving() or self._has_unread_answer():
            # uvicorn would no longer notice that the first request's client leaves, and would wait for ever to answer
            # one that reads nothing. No common client does this.
            self.transport.close_at_once()
            self._keeper.is_idle(self)
            raise _Refused
        self._head_came()
        self._await_head()
        self._num_framing_bytes = self._num_read
        self._num_head_bytes = self._num_body_bytes = self._num_pieces = 0
        self.transport.is_peer_sending = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._stop(414, f"the URL has more than {MAX_URL_BYTES} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_timer is None:
            self._stop(400, "trailers are not taken here: send the body without them")
        self._num_head_bytes += len(name) + len(value) + _NUM_BYTES_BESIDE_HEADER
        self._check_head()
        if len(self.headers) >= MAX_HEADERS:
            self._stop(431, f"the request has more than {MAX_HEADERS} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            self._stop(405, "this server is no proxy: CONNECT is not taken")
        if self._is_upgrade():
            # The head comes again without the header.
            return
        self._num_head_bytes += len(self.parser.get_method()) + len(self.url) + _NUM_BYTES_BESIDE_REQUEST
        self._check_head()
        self._head_came()
        self._keeper.is_busy(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_framing_bytes -= len(body)
        self._num_body_bytes += len(body)
        self._num_pieces += 1
        if self._num_pieces > MAX_PIECES + self._num_body_bytes // MIN_BYTES_PER_PIECE:
            self._stop(400, f"the body comes in chunks of less than {MIN_BYTES_PER_PIECE} bytes: send larger ones")
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_upgrade():
            self.transport.is_peer_sending = False
            super().on_message_complete()

    def on_response_complete(self) -> None:
        # An unread part of a refused body would stay as long as the connection.
        self.cycle.body = bytearray()
        self._keeper.is_idle(self)
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        if cycle.scope["http_version"] == "1.0":
            app = _until_close(app, cycle)
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def _feed(self, data: bytes | memoryview) -> None:
        """Raises HttpParserError."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # The parser takes the rest for another protocol. HTTP lets a server ignore the header, so parse the head
            # again without it; `on_message_begin` counts anew.
            version = self.parser.get_http_version().encode()
            head = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
            head += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(b"\r\n".join([*head, b"", b""]))
            self._feed(memoryview(data)[upgrade.args[0] :])

    def _check_head(self) -> None:
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._stop(431, _TOO_LARGE_HEAD)

    def _is_upgrade(self) -> bool:
        return self.parser.should_upgrade()

    def _is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _has_unread_answer(self) -> bool:
        return self.cycle is not None and self.transport.get_write_buffer_size() > 0

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close_at_once)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop(self, status: int, message: str) -> None:
        self._refusal = status, message
        raise _Refused

    def _refuse(self, status: int, message: str) -> None:
        """Answers instead of the application, unless it has begun to."""
        self._head_came()
        if self._is_serving():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not self._is_serving() or not self.cycle.response_started:
            self.transport.write(refusal(status, message))
        self.transport.is_peer_sending = True
        self.transport.close()
        self._keeper.is_idle(self)


def refusal(status: int, message: str) -> bytes:
    """Returns a whole answer."""
    response = status_response(status, message, {"connection": "close"})
    lines = [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
    return b"".join([STATUS_LINE[status], *lines, b"\r\n", bytes(response.body)])


def _until_close(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """HTTP/1.0 has no chunks: the end of the connection ends an answer of unknown length."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_until_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
                    cycle.chunked_encoding, cycle.expected_content_length = False, math.inf  # type: ignore[assignment]
            elif cycle.expected_content_length == math.inf and not message.get("more_body", False):
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_until_close)

    return run
