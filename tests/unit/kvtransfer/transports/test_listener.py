"""The sender among crowds of strangers at a receiver's port."""

import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from tandem.deploy.host.certificates import make_certificates
from tandem.kvtransfer.transports import listener, peer_socket
from tandem.kvtransfer.transports.listener import MAX_KNOCKED, MAX_LOGGED, MAX_STRANGERS, Listener
from tandem.rpc.credentials import make_context
from tests.fakes.raw_sockets import is_closed

TLS = make_certificates()
# More than any number of places.
CROWD = MAX_STRANGERS + MAX_KNOCKED + 40


@pytest.fixture(params=["plain", "TLS"])
def contexts(request: pytest.FixtureRequest) -> Iterator[tuple[ssl.SSLContext | None, ssl.SSLContext | None]]:
    """A receiver's and a sender's context."""
    if request.param == "plain":
        yield None, None
    else:
        yield make_context(TLS, server_side=True), make_context(TLS, server_side=False)


class Receiver:
    """A listener and the thread that waits for the sender."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.listener = Listener("127.0.0.1", context)
        self.endpoint = self.listener.endpoint
        self._pool = ThreadPoolExecutor(1)
        self.accepted = self._pool.submit(self.listener.accept)

    def stranger(self, said: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
        connection = socket.create_connection((self.endpoint.host, self.endpoint.port), 10.0, (source, 0))
        connection.sendall(said)
        return connection

    def __enter__(self) -> "Receiver":
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.wake()
        self._pool.shutdown()
        with suppress(OSError):
            self.accepted.result().close()
        self.listener.close()


class SlowHandshake:
    """A sender's context whose handshake begins when a crowd has come."""

    def __init__(self, context: ssl.SSLContext | None, before: Any) -> None:
        self._context = context
        self._before = before

    def wrap_socket(self, connection: socket.socket, **options: Any) -> socket.socket:
        self._before()
        return self._context.wrap_socket(connection, **options) if self._context is not None else connection


def test_sender_in_its_handshake_keeps_its_place(
    contexts: tuple[ssl.SSLContext | None, ssl.SSLContext | None],
) -> None:
    server, client = contexts
    with Receiver(server) as receiver, ExitStack() as crowd:
        num_crowds = 0

        def come() -> None:
            nonlocal num_crowds
            num_crowds += 1
            connections = [crowd.enter_context(receiver.stranger()) for _ in range(CROWD)]
            assert is_closed(connections[0]), "the crowd has not been heard yet"

        sender = peer_socket.connect(receiver.endpoint.encode(), SlowHandshake(client, come))  # type: ignore[arg-type]
        with sender:
            accepted = receiver.accepted.result(10.0)
            accepted.sendall(b"pages")
            assert (sender.recv(5), num_crowds) == (b"pages", 1)


def test_sender_gets_in_while_strangers_keep_coming(
    contexts: tuple[ssl.SSLContext | None, ssl.SSLContext | None],
) -> None:
    server, client = contexts
    stop = threading.Event()

    def besiege(receiver: Receiver) -> int:
        """Connect as fast as possible and hold all connections."""
        held = []
        with suppress(OSError):
            while not stop.is_set() and len(held) < 5000:
                held.append(receiver.stranger(b"x"))
        for connection in held:
            connection.close()
        return len(held)

    with Receiver(server) as receiver, ThreadPoolExecutor(4) as pool:
        besiegers = [pool.submit(besiege, receiver) for _ in range(4)]
        try:
            time.sleep(0.3)
            peer_socket.connect(receiver.endpoint.encode(), client).close()
            assert receiver.accepted.result(10.0)
        finally:
            stop.set()
        assert sum(one.result() for one in besiegers) > MAX_STRANGERS


def test_crowd_of_one_address_takes_no_place_of_another() -> None:
    with Receiver() as receiver, ExitStack() as held:
        silent = held.enter_context(receiver.stranger(source="127.0.0.2"))
        crowd = [held.enter_context(receiver.stranger()) for _ in range(CROWD)]
        assert is_closed(crowd[0])
        silent.sendall(receiver.endpoint.knock)
        assert silent.recv(1) == peer_socket.TAKEN


def test_later_knocks_take_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a knock that was read from the network and repeated."""
    with Receiver() as receiver, ExitStack() as held:
        first = held.enter_context(receiver.stranger(receiver.endpoint.knock))
        assert first.recv(1) == peer_socket.TAKEN
        replayed = [held.enter_context(receiver.stranger(receiver.endpoint.knock)) for _ in range(3 * MAX_KNOCKED)]
        assert is_closed(replayed[-1])
        first.sendall(receiver.endpoint.token)
        assert receiver.accepted.result(10.0)


def test_refusals_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        with Receiver() as receiver:
            for _ in range(MAX_LOGGED + 30):
                with receiver.stranger(b"x" * 16) as stranger:
                    assert is_closed(stranger)
        assert len(caplog.messages) == MAX_LOGGED + 1
        assert caplog.messages[0].endswith("its knock is wrong")
        assert caplog.messages[-1].startswith(f"{MAX_LOGGED + 30} connections to port")


def test_sender_that_was_turned_away_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host was too busy to knock in time."""
    monkeypatch.setattr(listener, "KNOCK_TIMEOUT_S", 0.05)
    connect = socket.create_connection
    num_calls = 0

    def slow(*arguments: Any) -> socket.socket:
        nonlocal num_calls
        num_calls += 1
        connection = connect(*arguments)
        if num_calls < 3:
            assert is_closed(connection)
        return connection

    monkeypatch.setattr(peer_socket.socket, "create_connection", slow)
    with Receiver() as receiver:
        peer_socket.connect(receiver.endpoint.encode()).close()
        assert receiver.accepted.result(10.0) and num_calls >= 3


def test_receiver_that_never_takes_the_sender_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_socket, "CONNECT_TIMEOUT_S", 0.3)
    other = Listener("127.0.0.1").endpoint
    with Receiver() as receiver, pytest.raises(OSError, match=r"no connection to 127\.0\.0\.1:\d+: "):
        peer_socket.connect(receiver.endpoint._replace(token=other.token).encode())
