"""The TCP connection of a two-sided transport, optionally over TLS. The receiver accepts the one sender that shows its
token.

The sender's first bytes, in the clear, are a knock: a digest of the token. By it the receiver tells the sender from
strangers before any handshake, so they cannot take its place (listener.py). The token itself follows inside TLS.
"""

import contextlib
import hashlib
import selectors
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tandem.config import SERVER_NAME

# Shorter than OPEN_TIMEOUT_S, so that the reason is reported.
CONNECT_TIMEOUT_S = 3.0
# Pause before a receiver that turned the sender away is called again, in seconds.
_RETRY_DELAY_S = 0.05
# Time without a byte after which a peer counts as lost, in seconds.
STALL_TIMEOUT_S = 30.0
# Endpoint: port and token, then the host in UTF-8.
TOKEN_BYTES = 16
KNOCK_BYTES = 16
_ENDPOINT = struct.Struct(f"!H{TOKEN_BYTES}s")
# Sent once the knock and, with TLS, the certificate are checked: in TLS 1.3 a sender's handshake ends before that.
TAKEN = b"\1"


class Endpoint(NamedTuple):
    host: str
    port: int
    token: bytes

    @property
    def knock(self) -> bytes:
        """The sender's first bytes. They do not reveal the token."""
        return hashlib.blake2b(self.token, digest_size=KNOCK_BYTES, person=b"tandem knock").digest()

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
    """Connects to a receiver and shows its token. `context` None means no TLS. A receiver that closes the connection
    before it has taken it, for strangers crowd it, is called again for CONNECT_TIMEOUT_S.

    Raises:
        ValueError: the endpoint is invalid.
        OSError: the receiver cannot be reached, or a certificate is refused.
    """
    to = Endpoint.decode(endpoint)
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            return _connect_once(to, context, max(_RETRY_DELAY_S, deadline - time.monotonic()))
        except _TurnedAwayError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_DELAY_S)


class _TurnedAwayError(OSError):
    """The receiver closed the connection before it had taken it, without a reason."""


def _connect_once(to: Endpoint, context: ssl.SSLContext | None, timeout_s: float) -> socket.socket:
    try:
        connection = socket.create_connection((to.host, to.port), timeout_s)
    except OSError as error:
        raise OSError(f"no connection to {to.host}:{to.port}: {error}") from error
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(to.knock)
        if context is not None:
            connection = context.wrap_socket(connection, server_hostname=SERVER_NAME)
        if connection.recv(len(TAKEN)) != TAKEN:
            raise ConnectionResetError("the receiver closed the connection")
        connection.sendall(to.token)
        connection.settimeout(STALL_TIMEOUT_S)
    except OSError as error:
        close(connection)
        what = f"no connection to {to.host}:{to.port}" if context is None else f"no TLS with {to.host}:{to.port}"
        is_turned_away = isinstance(error, ConnectionError | ssl.SSLEOFError | ssl.SSLZeroReturnError)
        raise (_TurnedAwayError if is_turned_away else OSError)(f"{what}: {error}") from error
    return connection


def wait_readable(files: Iterable[socket.socket], until: float) -> None:
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
