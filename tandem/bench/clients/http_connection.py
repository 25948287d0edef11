"""One HTTP/1.1 connection for sequential requests, parsed by httptools.

Data is handled in the loop's read callback. No task has to wake up first, so other streams delay no timestamp.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import cast
from urllib.parse import SplitResult

from httptools import HttpParserError, HttpResponseParser

MAX_ERROR_BYTES = 65536


class ConnectionLostError(Exception):
    """Attributes: is_untouched: no part of an answer arrived, so the request may be repeated."""

    def __init__(self, detail: str, *, is_untouched: bool) -> None:
        super().__init__(detail)
        self.is_untouched = is_untouched


class HttpConnection(asyncio.Protocol):
    """Attributes: error_body: of the latest answer, if its status was not 200."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._parser: HttpResponseParser | None = None
        self._on_body: Callable[[bytes], None] | None = None
        self._done: asyncio.Future[int] | None = None
        self._has_begun = False
        # As in HTTP/1.0.
        self._ends_with_connection = False
        self.headers: dict[str, str] = {}
        self.error_body = bytearray()

    @classmethod
    async def connect(cls, url: SplitResult, context: ssl.SSLContext | None) -> "HttpConnection":
        assert url.hostname is not None
        port = url.port or (443 if url.scheme == "https" else 80)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, url.hostname, port, ssl=context)
        return connection

    async def request(self, data: bytes, on_body: Callable[[bytes], None]) -> int:
        """Send a request and return the status at the end of its answer.

        Args:
            on_body: called with each piece of the body if the status is 200.

        Raises:
            ConnectionLostError: the connection ended early, or the answer is not HTTP.
        """
        if not self.is_open or self._transport is None:
            raise ConnectionLostError("the connection is closed", is_untouched=True)
        self.num_requests += 1
        self._parser = HttpResponseParser(self)
        self._on_body, self._has_begun = on_body, False
        self._ends_with_connection = False
        self.headers.clear()
        self.error_body.clear()
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        try:
            return await self._done
        finally:
            if not self._done.done() or self._done.cancelled() or self._done.exception() is not None:
                self.close()
            self._done = None

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._done is None:
            # Unsolicited, such as an error before the server closes an idle connection.
            self.close()
            return
        self._has_begun = True
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            self._fail(f"the answer is not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if exc is None and self._ends_with_connection and self._done is not None and not self._done.done():
            assert self._parser is not None
            self._done.set_result(self._parser.get_status_code())
        self._fail(f"the connection broke ({exc})" if exc else "the server closed the connection")

    # --- httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        is_framed = "content-length" in self.headers or "transfer-encoding" in self.headers
        self._ends_with_connection = self._parser.get_status_code() >= 200 and not is_framed

    def on_body(self, body: bytes) -> None:
        assert self._parser is not None and self._on_body is not None
        if self._parser.get_status_code() == 200:
            self._on_body(body)
        elif len(self.error_body) < MAX_ERROR_BYTES:
            self.error_body += body

    def on_message_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200:
            return
        self.is_open = self.is_open and self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(status)

    def _fail(self, detail: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionLostError(detail, is_untouched=not self._has_begun))
