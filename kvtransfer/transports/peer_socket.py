"""The TCP connection between the two ends of a two-sided transport: the receiver listens for the one sender that was
told a token."""

import contextlib
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

# A host that does not answer is given up after less time than an end may take to open, so that the reason is told.
CONNECT_TIMEOUT_S = 3.0
# This is longer than a sender takes to open its end once it has heard of this one.
ACCEPT_TIMEOUT_S = 30.0
# The sender's first bytes are its token, so whoever needs longer for one is a stranger.
TOKEN_TIMEOUT_S = 3.0
# Strangers may stand before the sender.
_BACKLOG = 16
# A peer that takes or gives no byte for this long is as good as gone.
STALL_TIMEOUT_S = 30.0
# An endpoint is the port and the token that the connection must begin with, then the host in UTF-8.
_TOKEN_BYTES = 16
_ENDPOINT = struct.Struct(f"!H{_TOKEN_BYTES}s")


class Endpoint(NamedTuple):
    """Where a receiver listens, and what a connection must begin with for it to listen on."""

    host: str
    port: int
    token: bytes

    def encode(self) -> bytes:
        return _ENDPOINT.pack(self.port, self.token) + self.host.encode()

    @staticmethod
    def decode(endpoint: bytes) -> "Endpoint":
        """Raises ValueError: these bytes are no endpoint of this kind."""
        try:
            port, token = _ENDPOINT.unpack_from(endpoint)
            host = endpoint[_ENDPOINT.size :].decode()
        except (struct.error, UnicodeDecodeError) as error:
            raise ValueError(f"{len(endpoint)} bytes that are not a TCP endpoint: {error}") from error
        if not (host and port):
            raise ValueError("the receiver told a TCP endpoint without host or port")
        return Endpoint(host, port, token)


def connect(endpoint: bytes) -> socket.socket:
    """Connects to a receiver and shows its token.

    Raises:
        ValueError: these bytes are no endpoint of this kind.
        OSError: the receiver cannot be reached.
    """
    host, port, token = Endpoint.decode(endpoint)
    try:
        connection = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
    except OSError as error:
        raise OSError(f"no connection to {host}:{port}: {error}") from error
    try:
        connection.settimeout(STALL_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(token)
    except OSError:
        connection.close()
        raise
    return connection


class Listener:
    """Listens for one connection, whoever else may come."""

    def __init__(self, host: str) -> None:
        """Raises OSError: `host` is no address of this host's."""
        self._socket = socket.create_server((host, 0), backlog=_BACKLOG)
        self.endpoint = Endpoint(host, self._socket.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES))

    def accept(self) -> socket.socket:
        """Waits for the sender. Raises OSError: it did not come, or nobody waits for it any more."""
        deadline = time.monotonic() + ACCEPT_TIMEOUT_S
        while True:
            self._socket.settimeout(max(0.0, deadline - time.monotonic()))
            connection, _ = self._socket.accept()
            if _shows(connection, self.endpoint.token):
                self._socket.close()
                return connection
            connection.close()

    def wake(self) -> None:
        """Ends `accept`, which another thread may be in."""
        wake(self._socket)

    def close(self) -> None:
        close(self._socket)


def _shows(connection: socket.socket, token: bytes) -> bool:
    """Whether a connection begins with the token; it is ready for use then."""
    deadline = time.monotonic() + TOKEN_TIMEOUT_S
    shown = b""
    try:
        while len(shown) < len(token):
            connection.settimeout(max(0.0, deadline - time.monotonic()))
            if not (part := connection.recv(len(token) - len(shown))):
                return False
            shown += part
        connection.settimeout(STALL_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError:
        return False
    return secrets.compare_digest(shown, token)


def read_into(connection: socket.socket, view: memoryview, is_aborted: Callable[[], bool] = lambda: False) -> None:
    """Fills the view. Raises OSError: the peer has closed the connection or gives nothing, or nobody wants it."""
    while view.nbytes:
        if is_aborted():
            raise OSError("aborted")
        num_read = connection.recv_into(view)
        if num_read == 0:
            raise OSError("the other end closed the connection")
        view = view[num_read:]


def wake(sock: socket.socket) -> None:
    """Ends what another thread is blocked on at a socket. It stays open: who is just about to use it would use whatever
    has its number next."""
    # It fails where nothing is connected, or is closed already: nobody is blocked then.
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def close(sock: socket.socket) -> None:
    """Closes a socket that no other thread uses any more."""
    # The peer hears of it at once, though a child of this process may have the socket too.
    wake(sock)
    with contextlib.suppress(OSError):
        sock.close()
