"""The TCP connection of a two-sided transport, optionally over TLS. The receiver accepts the one sender that shows its
token."""

import contextlib
import logging
import secrets
import selectors
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tandem.config import SERVER_NAME

logger = logging.getLogger(__name__)

# Shorter than OPEN_TIMEOUT_S, so that the reason is reported.
CONNECT_TIMEOUT_S = 3.0
# Longer than a sender needs to open its end.
ACCEPT_TIMEOUT_S = 30.0
# The sender shows the token at once; a slower connection is a stranger's.
TOKEN_TIMEOUT_S = 3.0
# Strangers may connect first. Beyond the limit the oldest is refused.
_BACKLOG = 128
_MAX_NEWCOMERS = 16
# Time without a byte after which a peer counts as lost, in seconds.
STALL_TIMEOUT_S = 30.0
# Endpoint: port and token, then the host in UTF-8.
_TOKEN_BYTES = 16
_ENDPOINT = struct.Struct(f"!H{_TOKEN_BYTES}s")
# In TLS 1.3 a sender's handshake ends before the receiver has checked its certificate, so the sender waits for this
# byte.
_TAKEN = b"\1"


class Endpoint(NamedTuple):
    host: str
    port: int
    token: bytes

    def encode(self) -> bytes:
        return _ENDPOINT.pack(self.port, self.token) + self.host.encode()

    @staticmethod
    def decode(endpoint: bytes) -> "Endpoint":
        try:
            port, token = _ENDPOINT.unpack_from(endpoint)
            host = endpoint[_ENDPOINT.size :].decode()
        except (struct.error, UnicodeDecodeError) as error:
            raise ValueError(f"{len(endpoint)} bytes that are not a TCP endpoint: {error}") from error
        if not (host and port):
            raise ValueError("the receiver sent a TCP endpoint without host or port")
        return Endpoint(host, port, token)


def connect(endpoint: bytes, context: ssl.SSLContext | None = None) -> socket.socket:
    """Connects to a receiver and shows its token. `context` None means no TLS.

    Raises:
        ValueError: the endpoint is invalid.
        OSError: the receiver cannot be reached, or a certificate is refused.
    """
    host, port, token = Endpoint.decode(endpoint)
    try:
        connection = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
    except OSError as error:
        raise OSError(f"no connection to {host}:{port}: {error}") from error
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            connection = context.wrap_socket(connection, server_hostname=SERVER_NAME)
            if connection.recv(len(_TAKEN)) != _TAKEN:
                raise OSError("the receiver closed the connection")
        connection.sendall(token)
        connection.settimeout(STALL_TIMEOUT_S)
    except OSError as error:
        connection.close()
        if context is None:
            raise
        raise OSError(f"no TLS with {host}:{port}: {error}") from error
    return connection


class Listener:
    def __init__(self, host: str, context: ssl.SSLContext | None = None) -> None:
        """Raises OSError if `host` is not an address of this host."""
        self._context = context
        self._socket = socket.create_server((host, 0), backlog=_BACKLOG)
        self.endpoint = Endpoint(host, self._socket.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES))

    def accept(self) -> socket.socket:
        """Waits for the sender; strangers do not delay it. Raises OSError on timeout or `wake`."""
        self._socket.setblocking(False)
        deadline = time.monotonic() + ACCEPT_TIMEOUT_S
        newcomers: list[_Newcomer] = []
        try:
            while time.monotonic() < deadline:
                wait_readable([self._socket, *newcomers], min([deadline, *(one.deadline for one in newcomers)]))
                with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                    connection, (host, *_) = self._socket.accept()
                    newcomers.append(_Newcomer(connection, host, self.endpoint.token, self._context))
                for newcomer in list(newcomers):
                    if newcomer.is_sender():
                        newcomers.remove(newcomer)
                        self._socket.close()
                        return newcomer.connection
                for newcomer in [one for one in newcomers if one.refusal] or newcomers[:-_MAX_NEWCOMERS]:
                    newcomers.remove(newcomer)
                    newcomer.turn_away(self.endpoint.port)
        finally:
            for newcomer in newcomers:
                close(newcomer.connection)
        raise TimeoutError("the sender did not come")

    def wake(self) -> None:
        """Ends an `accept` in another thread."""
        wake(self._socket)

    def close(self) -> None:
        close(self._socket)


class _Newcomer:
    """A connection that has not shown the token. Attributes: refusal: reason to refuse it, or ""."""

    def __init__(self, connection: socket.socket, host: str, token: bytes, context: ssl.SSLContext | None) -> None:
        self.connection = connection
        self.deadline = time.monotonic() + TOKEN_TIMEOUT_S
        self.refusal = ""
        self._host = host
        self._token = token
        self._shown = b""
        self._context = context
        self._has_met = False
        connection.setblocking(False)

    def fileno(self) -> int:
        return self.connection.fileno()

    def is_sender(self) -> bool:
        """Returns whether it has shown the token."""
        try:
            self._go_on()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if time.monotonic() >= self.deadline:
                self.refusal = f"it did not show the token within {TOKEN_TIMEOUT_S:g} s"
            return False
        except OSError as error:
            self.refusal = str(error)
            return False
        return True

    def turn_away(self, port: int) -> None:
        why = self.refusal or "too many connections"
        logger.warning(
            "a connection from %s to port %d, for pages of one sender, was refused: %s", self._host, port, why
        )
        close(self.connection)

    def _go_on(self) -> None:
        """Returns once it is ready; raises otherwise."""
        if self._context is not None:
            if not isinstance(self.connection, ssl.SSLSocket):
                self.connection = self._context.wrap_socket(
                    self.connection, server_side=True, do_handshake_on_connect=False
                )
            if not self._has_met:
                self.connection.do_handshake()
                self._has_met = True
                self.connection.sendall(_TAKEN)
        while len(self._shown) < len(self._token):
            if not (part := self.connection.recv(len(self._token) - len(self._shown))):
                raise OSError("it closed the connection")
            self._shown += part
        if not secrets.compare_digest(self._shown, self._token):
            raise OSError("its token is wrong")
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection.settimeout(STALL_TIMEOUT_S)


def wait_readable(files: Iterable[socket.socket | _Newcomer], until: float) -> None:
    """Returns when a socket is readable, or at `until`."""
    with selectors.DefaultSelector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        selector.select(max(0.0, until - time.monotonic()))


def read_into(connection: socket.socket, view: memoryview, is_aborted: Callable[[], bool] = lambda: False) -> None:
    """Fills the view. Raises OSError if the peer closes or stalls, or on abort."""
    while view.nbytes:
        if is_aborted():
            raise OSError("aborted")
        num_read = connection.recv_into(view)
        if num_read == 0:
            raise OSError("the other end closed the connection")
        view = view[num_read:]


def take(connection: socket.socket, num_bytes: int) -> bytes:
    """Reads at most `num_bytes` without blocking; b"" if nothing is complete."""
    try:
        return connection.recv(num_bytes)
    except (BlockingIOError, ssl.SSLWantReadError):
        return b""


def has_come(connection: socket.socket) -> bool:
    """Returns whether data has arrived. Raises OSError if the connection broke."""
    return bool(_next_byte(connection))


def has_ended(connection: socket.socket) -> bool:
    """Returns whether the other end closed and all data is read. Raises like `has_come`."""
    return _next_byte(connection) == b""


def _next_byte(connection: socket.socket) -> bytes | None:
    """Peeks at the next raw byte; b"" at the end, None without data."""
    if isinstance(connection, ssl.SSLSocket) and connection.pending():
        return b"\0"
    try:
        # Below TLS, which cannot peek.
        return socket.socket.recv(connection, 1, socket.MSG_PEEK)
    except BlockingIOError:
        return None


def wake(sock: socket.socket) -> None:
    """Unblocks another thread. The socket stays open, because its descriptor could be reused under that thread."""
    # Unconnected or closed: no thread blocks on it.
    with contextlib.suppress(OSError):
        # TLS's own shutdown would let a reader take encrypted bytes for pages.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def close(sock: socket.socket) -> None:
    # Reaches the peer even if a child process shares the socket.
    wake(sock)
    with contextlib.suppress(OSError):
        sock.close()
