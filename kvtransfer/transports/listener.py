"""A receiver's port for the one sender that knows its token, whoever else connects.

A newcomer that has not knocked holds one of MAX_STRANGERS places for at most KNOCK_TIMEOUT_S. When they are full, the
oldest connection of the address with the most makes room, so the latest one is always heard. A newcomer that knocked is
never sent away for strangers, who cannot know the knock.
"""

import logging
import secrets
import selectors
import socket
import ssl
import time
from collections import Counter

from tandem.kvtransfer.transports.peer_socket import (
    KNOCK_BYTES,
    STALL_TIMEOUT_S,
    TAKEN,
    TOKEN_BYTES,
    Endpoint,
    close,
    wake,
)

logger = logging.getLogger(__name__)

# Longer than a sender needs to open its end.
ACCEPT_TIMEOUT_S = 30.0
# The sender knocks at once. The token takes a TLS handshake more.
KNOCK_TIMEOUT_S = 1.0
TOKEN_TIMEOUT_S = 3.0
MAX_STRANGERS = 64
# Beyond the sender itself, only who has read its knock from the network can knock: the first keep their places.
MAX_KNOCKED = 4
# Connections that the kernel completes before the thread accepts them, and that it accepts before it reads from any.
_BACKLOG = 128
_ACCEPTED_AT_ONCE = 16
# Refusals with a log line of their own; the others are counted.
MAX_LOGGED = 20


class Listener:
    def __init__(self, host: str, context: ssl.SSLContext | None = None) -> None:
        """Raises OSError if `host` is not an address of this host."""
        self._context = context
        self._socket = socket.create_server((host, 0), backlog=_BACKLOG)
        self.endpoint = Endpoint(host, self._socket.getsockname()[1], secrets.token_bytes(TOKEN_BYTES))
        self._newcomers: list[_Newcomer] = []
        self._num_refused = 0

    def accept(self) -> socket.socket:
        """Waits for the sender; strangers do not delay it. Raises OSError on timeout or `wake`."""
        self._socket.setblocking(False)
        deadline = time.monotonic() + ACCEPT_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            try:
                while time.monotonic() < deadline:
                    until = min([deadline, *(one.deadline for one in self._newcomers)])
                    ready = {key.fd for key, _ in selector.select(max(0.0, until - time.monotonic()))}
                    if self._socket.fileno() in ready:
                        self._let_in(selector)
                    # The new ones too: their knock has mostly come.
                    for newcomer in list(self._newcomers):
                        if newcomer.is_sender():
                            self._newcomers.remove(newcomer)
                            self._socket.close()
                            return newcomer.connection
                    self._make_room(selector)
            finally:
                for newcomer in self._newcomers:
                    close(newcomer.connection)
                self._newcomers.clear()
                if self._num_refused > MAX_LOGGED:
                    logger.warning(
                        "%d connections to port %d, for pages of one sender, were refused",
                        self._num_refused,
                        self.endpoint.port,
                    )
        raise TimeoutError("the sender did not come")

    def wake(self) -> None:
        """Ends an `accept` in another thread."""
        wake(self._socket)

    def close(self) -> None:
        close(self._socket)

    def _let_in(self, selector: selectors.BaseSelector) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, (host, *_) = self._socket.accept()
            except ConnectionAbortedError:
                continue
            except BlockingIOError:
                return
            newcomer = _Newcomer(connection, host, self.endpoint, self._context)
            selector.register(newcomer.descriptor, selectors.EVENT_READ)
            self._newcomers.append(newcomer)

    def _make_room(self, selector: selectors.BaseSelector) -> None:
        for newcomer in [one for one in self._newcomers if one.refusal]:
            self._turn_away(newcomer, selector)
        for newcomer in [one for one in self._newcomers if one.has_knocked][MAX_KNOCKED:]:
            self._turn_away(newcomer, selector)
        strangers = [one for one in self._newcomers if not one.has_knocked]
        num_of = Counter(one.host for one in strangers)
        for _ in range(len(strangers) - MAX_STRANGERS):
            crowd = max(num_of, key=num_of.__getitem__)
            oldest = next(one for one in strangers if one.host == crowd)
            strangers.remove(oldest)
            num_of[crowd] -= 1
            self._turn_away(oldest, selector)

    def _turn_away(self, newcomer: "_Newcomer", selector: selectors.BaseSelector) -> None:
        self._newcomers.remove(newcomer)
        self._num_refused += 1
        if self._num_refused <= MAX_LOGGED:
            logger.warning(
                "a connection from %s to port %d, for pages of one sender, was refused: %s",
                newcomer.host,
                self.endpoint.port,
                newcomer.refusal or "too many connections",
            )
        selector.unregister(newcomer.descriptor)
        close(newcomer.connection)


class _Newcomer:
    """A connection that has not shown the token.

    Attributes:
        descriptor: of the connection as accepted; TLS may close it before its time.
        has_knocked: it knows the knock.
        refusal: reason to refuse it, or "".
    """

    def __init__(
        self, connection: socket.socket, host: str, expected: Endpoint, context: ssl.SSLContext | None
    ) -> None:
        self.connection = connection
        self.descriptor = connection.fileno()
        self.host = host
        self.deadline = time.monotonic() + KNOCK_TIMEOUT_S
        self.has_knocked = False
        self.refusal = ""
        self._expected = expected
        self._shown = b""
        self._context = context
        self._has_met = False
        connection.setblocking(False)

    def is_sender(self) -> bool:
        """Returns whether it has shown the token."""
        try:
            self._go_on()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if time.monotonic() >= self.deadline:
                what, limit_s = ("token", TOKEN_TIMEOUT_S) if self.has_knocked else ("knock", KNOCK_TIMEOUT_S)
                self.refusal = f"it did not show the {what} within {limit_s:g} s"
            return False
        except OSError as error:
            self.refusal = str(error)
            return False
        return True

    def _go_on(self) -> None:
        """Returns once it is ready; raises otherwise."""
        if not self.has_knocked:
            self._expect(self._expected.knock, KNOCK_BYTES, "knock")
            self.has_knocked = True
            self.deadline = time.monotonic() + TOKEN_TIMEOUT_S
        if not self._has_met:
            if self._context is not None:
                if not isinstance(self.connection, ssl.SSLSocket):
                    self.connection = self._context.wrap_socket(
                        self.connection, server_side=True, do_handshake_on_connect=False
                    )
                self.connection.do_handshake()
            self._has_met = True
            self.connection.sendall(TAKEN)
        self._expect(self._expected.token, TOKEN_BYTES, "token")
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection.settimeout(STALL_TIMEOUT_S)

    def _expect(self, secret: bytes, num_bytes: int, what: str) -> None:
        while len(self._shown) < num_bytes:
            if not (part := self.connection.recv(num_bytes - len(self._shown))):
                raise OSError("it closed the connection")
            self._shown += part
        shown, self._shown = self._shown, b""
        if not secrets.compare_digest(shown, secret):
            raise OSError(f"its {what} is wrong")
