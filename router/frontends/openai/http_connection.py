"""HTTP connections with limits on their number and on the time and size of request heads."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tandem.router.frontends.openai.errors import status_response

# From the connection or its last request to the end of the next head.
HEAD_TIMEOUT_S = 30.0
MAX_HEAD_BYTES = 64 * 2**10


class BoundedProtocol(HttpToolsProtocol):
    """Adds limits: uvicorn waits for a head for ever and buffers all of it."""

    _head_timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0
    _is_deaf = False

    def __init__(self, max_connections: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_connections = max_connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self._is_deaf = True
            self._refuse(503, f"{self._max_connections} connections are open already; try again later")
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        if self._is_serving():
            # uvicorn would no longer notice that the first request's client leaves. No common client does this.
            self._is_deaf = True
            self.transport.close()
            return
        self._head_came()
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if not self._is_deaf:
            self._head_came()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_deaf:
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        head = self._head_timer
        super().data_received(data)
        if head is None and self._head_timer is None and not self._is_serving() and not self.transport.is_closing():
            # Bytes that begin no request: uvicorn stops its own timer for the next head.
            self._await_head()
        # Bytes across a request's boundary may belong to a body.
        if head is not None and head is self._head_timer:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse_head()

    def _is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_head(self) -> None:
        self._refuse(431, f"the request's head has more than {MAX_HEAD_BYTES} bytes")

    def _refuse(self, status: int, message: str) -> None:
        response = status_response(status, message, {"connection": "close"})
        lines = [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
        self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n", bytes(response.body)]))
        self.transport.close()
