"""The TCP connection between the two ends of a two-sided transport: the receiver listens for the one sender that was
told a token, over TLS where the cluster's processes speak that."""

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

# A host that does not answer is given up after less time than an end may take to open, so that the reason is told.
CONNECT_TIMEOUT_S = 3.0
# This is longer than a sender takes to open its end once it has heard of this one.
ACCEPT_TIMEOUT_S = 30.0
# The sender begins with TLS, if that is asked for, and its token, so whoever needs longer for these is a stranger.
TOKEN_TIMEOUT_S = 3.0
# Strangers may stand before the sender. Of more than so many that are listened to at once the oldest gives way.
_BACKLOG = 128
_MAX_NEWCOMERS = 16
# A peer that takes or gives no byte for this long is as good as gone.
STALL_TIMEOUT_S = 30.0
# An endpoint is the port and the token that the connection must begin with, then the host in UTF-8.
_TOKEN_BYTES = 16
_ENDPOINT = struct.Struct(f"!H{_TOKEN_BYTES}s")
# In TLS 1.3 a sender is through with its part before the receiver has looked at its certificate. So it waits for this
# word, or for that of what is wrong with it.
_TAKEN = b"\1"


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


def connect(endpoint: bytes, context: ssl.SSLContext | None = None) -> socket.socket:
    """Connects to a receiver and shows its token.

    Args:
        context: for TLS; None: plain.

    Raises:
        ValueError: these bytes are no endpoint of this kind.
        OSError: the receiver cannot be reached, or one of the two does not take the other's certificate.
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
    """Listens for one connection, whoever else may come."""

    def __init__(self, host: str, context: ssl.SSLContext | None = None) -> None:
        """
        Args:
            context: for TLS; None: plain.

        Raises:
            OSError: `host` is no address of this host's.
        """
        self._context = context
        self._socket = socket.create_server((host, 0), backlog=_BACKLOG)
        self.endpoint = Endpoint(host, self._socket.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES))

    def accept(self) -> socket.socket:
        """Waits for the sender, whom no stranger holds up. Raises OSError: it did not come, or nobody waits for it any
        more."""
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
        """Ends `accept`, which another thread may be in."""
        wake(self._socket)

    def close(self) -> None:
        close(self._socket)


class _Newcomer:
    """A connection that has yet to show that it is the sender's.

    Attributes:
        connection: ready for use once it has.
        deadline: until which it has to.
        refusal: why it never will, or "".
    """

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
        """Goes on with what has come from it."""
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
        why = self.refusal or "there were too many"
        logger.warning(
            "a connection from %s to port %d, for pages of one sender, was refused: %s", self._host, port, why
        )
        close(self.connection)

    def _go_on(self) -> None:
        """Returns when it has shown the token, and is ready."""
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
    """Returns when there is something to read, or to accept, or at a time of time.monotonic()."""
    with selectors.DefaultSelector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        selector.select(max(0.0, until - time.monotonic()))


def read_into(connection: socket.socket, view: memoryview, is_aborted: Callable[[], bool] = lambda: False) -> None:
    """Fills the view. Raises OSError: the peer has closed the connection or gives nothing, or nobody wants it."""
    while view.nbytes:
        if is_aborted():
            raise OSError("aborted")
        num_read = connection.recv_into(view)
        if num_read == 0:
            raise OSError("the other end closed the connection")
        view = view[num_read:]


def take(connection: socket.socket, num_bytes: int) -> bytes:
    """So many bytes at most of what has come; b"" if they make no whole piece yet. The connection does not block."""
    try:
        return connection.recv(num_bytes)
    except (BlockingIOError, ssl.SSLWantReadError):
        return b""


def has_come(connection: socket.socket) -> bool:
    """Whether there is something to take, or nearly. Raises OSError: the connection broke."""
    return bool(_next_byte(connection))


def has_ended(connection: socket.socket) -> bool:
    """Whether the other end has closed it, and all is taken. Raises as `has_come`."""
    return _next_byte(connection) == b""


def _next_byte(connection: socket.socket) -> bytes | None:
    """As it travels, and it stays; b"" at the end; None if nothing has come."""
    if isinstance(connection, ssl.SSLSocket) and connection.pending():
        return b"\0"
    try:
        # Beneath TLS, which has no such question.
        return socket.socket.recv(connection, 1, socket.MSG_PEEK)
    except BlockingIOError:
        return None


def wake(sock: socket.socket) -> None:
    """Ends what another thread is blocked on at a socket. It stays open: who is just about to use it would use whatever
    has its number next."""
    # It fails where nothing is connected, or is closed already: nobody is blocked then.
    with contextlib.suppress(OSError):
        # TLS's own would have whoever reads meanwhile go on without it, and take what is encrypted for pages.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def close(sock: socket.socket) -> None:
    """Closes a socket that no other thread uses any more."""
    # The peer hears of it at once, though a child of this process may have the socket too.
    wake(sock)
    with contextlib.suppress(OSError):
        sock.close()
