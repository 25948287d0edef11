"""Accepts HTTP connections, within a limit that counts them from their first moment."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial

from tandem.router.frontends.openai.closing_transport import LINGER_S
from tandem.router.frontends.openai.http_connection import BoundedProtocol, Keeper, refusal

logger = logging.getLogger(__name__)

# A client without an answer to a handshake's message holds its place for so long.
HANDSHAKE_TIMEOUT_S = 10.0
ACCEPTS_PER_TURN = 64
# After a failed accept: usually the process has no free descriptor.
PAUSE_S = 0.1
# Connections beyond the limit that get an answer; they stay open until the client can have read it.
MAX_REFUSED = 64

# When the port is full, a connection without a request gives way to a new one after this time.
MIN_IDLE_S = 1.0

MakeProtocol = Callable[[Keeper], BoundedProtocol]


class Listener(Keeper):
    """Has the methods of an asyncio server that uvicorn calls."""

    def __init__(
        self, listening: socket.socket, make_protocol: MakeProtocol, max_connections: int, tls: ssl.SSLContext | None
    ) -> None:
        """Starts on the running loop.

        Beyond max_connections the longest idle connection ends. If all are busy, a new one gets 503; with TLS it is
        closed.
        """
        self._socket = listening
        self._socket.setblocking(False)
        self._make_protocol = make_protocol
        self._max_connections = max_connections
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._open: set[BoundedProtocol] = set()
        # With the time since when, the longest idle first.
        self._idle: dict[BoundedProtocol, float] = {}
        self._beginning: dict[BoundedProtocol, asyncio.Task[None]] = {}
        self._refused: dict[socket.socket, asyncio.TimerHandle] = {}
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        self._loop.remove_reader(self._socket)
        if self._pause is not None:
            self._pause.cancel()
        for task in self._beginning.values():
            task.cancel()
        for connection, timer in self._refused.items():
            timer.cancel()
            connection.close()
        self._refused.clear()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._beginning.values(), return_exceptions=True)

    def is_idle(self, connection: BoundedProtocol) -> None:
        self._idle.pop(connection, None)
        if connection in self._open:
            self._idle[connection] = self._loop.time()

    def is_busy(self, connection: BoundedProtocol) -> None:
        self._idle.pop(connection, None)

    def is_lost(self, connection: BoundedProtocol) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def _listen(self) -> None:
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                # The client has left already.
                continue
            except OSError as error:
                logger.warning("a connection to the HTTP port could not be accepted: %s", error.strerror)
                self._loop.remove_reader(self._socket)
                self._pause = self._loop.call_later(PAUSE_S, self._listen)
                return
            connection.setblocking(False)
            if len(self._open) < self._max_connections or self._end_longest_idle():
                protocol = self._make_protocol(self)
                self._open.add(protocol)
                self.is_idle(protocol)
                task = self._beginning[protocol] = self._loop.create_task(self._begin(connection, protocol))
                task.add_done_callback(partial(self._has_begun, protocol))
            else:
                self._refuse(connection)

    async def _begin(self, connection: socket.socket, protocol: BoundedProtocol) -> None:
        # A handshake that fails raises OSError.
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S if self._tls else None,
            )

    def _has_begun(self, protocol: BoundedProtocol, _: asyncio.Task[None]) -> None:
        del self._beginning[protocol]
        if not protocol.was_made:
            self.is_lost(protocol)

    def _end_longest_idle(self) -> bool:
        connection = next(iter(self._idle), None)
        if connection is None or self._loop.time() - self._idle[connection] < MIN_IDLE_S:
            return False
        self.is_lost(connection)
        if connection.was_made:
            connection.transport.abort()
        elif task := self._beginning.get(connection):
            task.cancel()
        return True

    def _refuse(self, connection: socket.socket) -> None:
        if self._tls is not None or len(self._refused) >= MAX_REFUSED:
            connection.close()
            return
        message = f"{self._max_connections} connections are open already; try again later"
        with contextlib.suppress(OSError):
            connection.send(refusal(503, message))
            connection.shutdown(socket.SHUT_WR)
        self._refused[connection] = self._loop.call_later(LINGER_S, self._close_refused, connection)

    def _close_refused(self, connection: socket.socket) -> None:
        del self._refused[connection]
        connection.close()
