"""Metrics over HTTP, for processes without another HTTP port.

One thread with a loop of its own serves all readers. It looks at the key as soon as a request's head is there, and
reads nothing after that. A newcomer beyond MAX_CONNECTIONS takes the place of the oldest reader without a valid key, so
strangers keep no reader out.
"""

import asyncio
import logging
import socket
import threading
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import h11
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from tandem.config import parse_api_key
from tandem.rpc.auth import TokenSet, bearer_token

logger = logging.getLogger(__name__)

PATH = "/metrics"
MAX_CONNECTIONS = 128
MAX_HEAD_BYTES = 8192
# Each takes 1.5 us of the interpreter that computes tokens.
MAX_HEAD_LINES = 128
# For a request and its answer together, in seconds.
REQUEST_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 2.0
_BACKLOG = 1024
# The loop accepts as many at once, and some times more before it reads from the first.
_ACCEPTED_AT_ONCE = 16


class MetricsServer:
    def __init__(self, registry: CollectorRegistry, host: str, api_keys: Sequence[str] = ()) -> None:
        """
        Args:
            api_keys: accepted bearer tokens, as "KEY" or "KEY MAX_PRIORITY"; empty admits everybody.

        Raises:
            OSError: the address is not local.
        """
        self._readers = _Readers(registry, TokenSet([parse_api_key(text).key for text in api_keys]))
        # Not the process's other loop: readers must not delay tokens. Not the policy's kind, which Ray sets.
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="metrics", daemon=True)
        self._thread.start()
        try:
            self._server = self._call(self._listen(host))
        except BaseException:
            self._end_loop()
            raise
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    def set_api_keys(self, api_keys: Sequence[str]) -> None:
        """Replaces the accepted keys. Callable from any thread."""
        self._readers.keys = TokenSet([parse_api_key(text).key for text in api_keys])

    def close(self) -> None:
        self._call(self._stop())
        self._end_loop()

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_START_TIMEOUT_S)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _listen(self, host: str) -> asyncio.Server:
        listener = socket.create_server((host, 0))
        server = await self._loop.create_server(
            lambda: _Reader(self._readers), sock=listener, backlog=_ACCEPTED_AT_ONCE
        )
        # asyncio takes one number for both. A full backlog costs a new reader a second.
        listener.listen(_BACKLOG)
        return server

    async def _stop(self) -> None:
        self._server.close()
        self._readers.close()


class _Readers:
    """All connections, oldest first. Attributes: keys: accepted; may be replaced."""

    def __init__(self, registry: CollectorRegistry, keys: TokenSet) -> None:
        self.registry = registry
        self.keys = keys
        # A dict for its order.
        self._connections: dict[_Reader, None] = {}

    def add(self, reader: "_Reader") -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            strangers = (one for one in self._connections if not one.is_admitted)
            oldest = next(strangers, next(iter(self._connections)))
            logger.debug("too many connections: closed the one from %s", oldest.peer)
            oldest.abort()
        self._connections[reader] = None

    def remove(self, reader: "_Reader") -> None:
        self._connections.pop(reader, None)

    def close(self) -> None:
        for reader in list(self._connections):
            reader.abort()


class _Reader(asyncio.Protocol):
    """One connection, for one request. Attributes: is_admitted: it has shown a valid key."""

    def __init__(self, readers: _Readers) -> None:
        self.is_admitted = False
        self.peer: Any = None
        self._readers = readers
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._is_answered = False
        self._num_read = self._num_lines = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.peer = transport.get_extra_info("peername")
        self._deadline = asyncio.get_running_loop().call_later(REQUEST_TIMEOUT_S, transport.abort)
        self._readers.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._deadline.cancel()
        self._readers.remove(self)

    def abort(self) -> None:
        self._transport.abort()
        # The loop reports the loss only later.
        self._readers.remove(self)

    def data_received(self, data: bytes) -> None:
        if self._is_answered:
            return
        # The parser limits only an unfinished head.
        room = MAX_HEAD_BYTES - self._num_read
        has_more, data = len(data) > room, data[:room]
        self._num_read += len(data)
        self._num_lines += data.count(b"\n")
        if self._num_lines > MAX_HEAD_LINES:
            self._answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b"the request's head has too many lines\n")
            return
        self._http.receive_data(data)
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            self._answer(HTTPStatus(error.error_status_hint), b"the request is malformed or its head too long\n")
            return
        if isinstance(event, h11.Request):
            self._answer_to(event)
        elif has_more:
            self._answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b"the request's head is too long\n")

    def _answer_to(self, request: h11.Request) -> None:
        authorization = dict(request.headers).get(b"authorization", b"").decode("latin-1")
        self.is_admitted = not self._readers.keys or bearer_token(authorization) in self._readers.keys
        if not self.is_admitted:
            self._answer(HTTPStatus.UNAUTHORIZED, b"an API key is needed\n", {"WWW-Authenticate": "Bearer"})
        elif request.method != b"GET":
            self._answer(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET is answered\n", {"Allow": "GET"})
        elif request.target.partition(b"?")[0] != PATH.encode():
            self._answer(HTTPStatus.NOT_FOUND, f"there is only {PATH} here\n".encode())
        else:
            try:
                body = generate_latest(self._readers.registry)
            except Exception:
                logger.exception("metrics could not be collected")
                self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"metrics could not be collected\n")
                return
            self._answer(HTTPStatus.OK, body, {"Content-Type": CONTENT_TYPE_LATEST})

    def _answer(self, status: HTTPStatus, body: bytes, headers: dict[str, str] | None = None) -> None:
        self._is_answered = True
        headers = {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body))} | (headers or {})
        head = h11.Response(
            status_code=status, reason=status.phrase, headers=[*headers.items(), ("Connection", "close")]
        )
        parts = [self._http.send(event) for event in (head, h11.Data(data=body), h11.EndOfMessage())]
        self._transport.write(b"".join(part for part in parts if part))
        # Sends the rest until the deadline.
        self._transport.close()
