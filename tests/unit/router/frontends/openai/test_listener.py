"""Connections count from their first moment, and those that say nothing end."""

import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from tandem.config import TlsConfig
from tandem.router.config import RouterAddresses, RouterConfig
from tandem.router.frontends.openai import closing_transport, http_connection, listener
from tandem.router.process import RouterProcess
from tests.conftest import Certificates
from tests.fakes.raw_http import error_of, read_all, read_one

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
GET_METRICS = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"
EXPOSITION = "tandem.router.observe.metrics.RouterMetrics.exposition"
MAX_CONNECTIONS = 3
WAIT_S = 0.3


@pytest.fixture(autouse=True)
def no_turnover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MIN_IDLE_S", 1000.0)


@contextlib.contextmanager
def router(directory: Path, tls: TlsConfig | None = None) -> Iterator[RouterAddresses]:
    process = RouterProcess(
        RouterConfig(str(directory), "fake", 64, grpc_port=0, http_port=0, max_connections=MAX_CONNECTIONS, tls=tls)
    )
    try:
        yield process.start()
    finally:
        process.stop()


@pytest.fixture(scope="module")
def secure(router_model_dir: Path, certificates: Certificates) -> Iterator[RouterAddresses]:
    with router(router_model_dir, TlsConfig(certificates.cert, certificates.key)) as addresses:
        yield addresses


@pytest.fixture
def context(certificates: Certificates) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificates.ca)


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10.0)


def is_served(address: str, context: ssl.SSLContext) -> bool:
    with (
        contextlib.suppress(OSError),
        connect(address) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        connection.sendall(GET)
        return connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    return False


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(65536) == b""
    except ConnectionError:
        return True


def test_connections_count_before_their_handshake(secure: RouterAddresses, context: ssl.SSLContext) -> None:
    assert is_served(secure.http, context)
    silent: list[socket.socket] = []
    try:
        # The connection above may take its place a moment longer.
        until(lambda: _hold(secure.http, silent) == MAX_CONNECTIONS)
        with connect(secure.http) as late:
            assert is_closed(late)
        assert not is_served(secure.http, context)
        silent.pop().close()
        until(lambda: is_served(secure.http, context))
    finally:
        for connection in silent:
            connection.close()
    until(lambda: is_served(secure.http, context))


def _hold(address: str, held: list[socket.socket]) -> int:
    connection = connect(address)
    connection.settimeout(0.2)
    try:
        assert connection.recv(1) == b""
        connection.close()
    except TimeoutError:
        held.append(connection)
    return len(held)


def test_a_handshake_has_a_deadline(
    secure: RouterAddresses, context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_TIMEOUT_S", WAIT_S)
    for part in (b"", b"\x16\x03\x01\x02\x00\x01"):
        with connect(secure.http) as silent:
            silent.sendall(part)
            assert is_closed(silent)
    for _ in range(2 * MAX_CONNECTIONS):
        with connect(secure.http) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while not is_closed(plain):
                pass
    until(lambda: is_served(secure.http, context))


@pytest.mark.parametrize("num_requests", [0, 1])
def test_an_idle_connection_ends_with_tls_too(
    secure: RouterAddresses, context: ssl.SSLContext, num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client never says goodbye, so the server may not wait for that."""
    monkeypatch.setattr(http_connection, "HEAD_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(closing_transport, "GOODBYE_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(closing_transport, "CHECK_INTERVAL_S", WAIT_S / 2)
    with connect(secure.http) as plain, context.wrap_socket(plain, server_hostname="localhost") as connection:
        for _ in range(num_requests):
            connection.sendall(GET)
            assert read_one(connection)
            # Begins another request, which has no keep-alive timeout.
            connection.sendall(b"GET /he")
        # Looks below TLS, which would answer the server's goodbye.
        with socket.socket(fileno=connection.detach()) as raw:
            raw.settimeout(10.0)
            while not is_closed(raw):
                pass
    until(lambda: is_served(secure.http, context))


def test_a_refused_connection_with_a_request_reads_its_answer(router_model_dir: Path) -> None:
    with router(router_model_dir) as addresses:
        held = [connect(addresses.http) for _ in range(MAX_CONNECTIONS)]
        for _ in range(20):
            with connect(addresses.http) as late:
                late.sendall(GET)
                assert error_of(read_all(late)) == (503, "3 connections are open already; try again later")
        for connection in held:
            connection.close()
        host, _, port = addresses.http.rpartition(":")

        def answers() -> bool:
            client = http.client.HTTPConnection(host, int(port), timeout=10.0)
            with contextlib.closing(client):
                client.request("GET", "/health")
                return client.getresponse().status == 200

        until(answers)


@pytest.mark.parametrize("is_secure", [False, True])
def test_an_idle_connection_gives_way_to_a_new_one(
    is_secure: bool,
    router_model_dir: Path,
    certificates: Certificates,
    context: ssl.SSLContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One client without a key must not keep others out."""
    tls = TlsConfig(certificates.cert, certificates.key) if is_secure else None

    def open_one(address: str) -> socket.socket:
        plain = connect(address)
        return context.wrap_socket(plain, server_hostname="localhost") if is_secure else plain

    with router(router_model_dir, tls) as addresses, contextlib.ExitStack() as held:
        streaming = held.enter_context(open_one(addresses.http))
        streaming.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert streaming.recv(65536)
        # Without TLS, two connections before a head; with it, two before their handshake.
        silent = [held.enter_context(connect(addresses.http)) for _ in range(MAX_CONNECTIONS - 1)]
        time.sleep(0.2)
        monkeypatch.setattr(listener, "MIN_IDLE_S", 0.0)
        late = held.enter_context(open_one(addresses.http))
        late.sendall(GET)
        assert late.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert is_closed(silent[0]), "the longest idle one"
        latest = held.enter_context(open_one(addresses.http))
        latest.sendall(GET)
        assert latest.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert is_closed(silent[1])
        assert b"data: {" in streaming.recv(65536) + streaming.recv(65536), "a request in hand is no idle connection"


@pytest.mark.parametrize("is_half_closed", [False, True])
def test_a_client_that_reads_nothing_of_its_answer_is_closed(
    is_half_closed: bool, router_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing_transport, "UNREAD_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(closing_transport, "CHECK_INTERVAL_S", WAIT_S / 2)
    # The answer must not fit the buffers of both ends.
    monkeypatch.setattr(EXPOSITION, lambda _: bytes(32 * 2**20))
    with router(router_model_dir) as addresses, connect(addresses.http) as deaf:
        if is_half_closed:
            deaf.sendall(GET_METRICS)
            time.sleep(WAIT_S)
            deaf.shutdown(socket.SHUT_WR)
        else:
            deaf.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        time.sleep(5 * WAIT_S)
        num_read = 0
        with contextlib.suppress(ConnectionError):
            while part := deaf.recv(2**20):
                num_read += len(part)
        assert num_read < 32 * 2**20, "the rest was given up"


def test_clients_that_read_no_answer_and_ask_on_keep_no_place(
    router_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The further answer would wait until the first is read."""
    # Stands for many small answers.
    monkeypatch.setattr(EXPOSITION, lambda _: bytes(32 * 2**20))
    monkeypatch.setattr(listener, "MIN_IDLE_S", 0.0)
    with router(router_model_dir) as addresses, contextlib.ExitStack() as held:
        deaf = [held.enter_context(connect(addresses.http)) for _ in range(MAX_CONNECTIONS)]
        for request in (GET_METRICS, GET):
            for connection in deaf:
                connection.sendall(request)
            time.sleep(WAIT_S)
        late = held.enter_context(connect(addresses.http))
        late.sendall(GET)
        assert late.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_refused_clients_that_stay_keep_no_place(router_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing_transport, "LINGER_S", 1000.0)
    monkeypatch.setattr(listener, "MIN_IDLE_S", 0.0)
    trailer = b"POST /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\na: b\r\n\r\n"
    with router(router_model_dir) as addresses, contextlib.ExitStack() as held:
        for _ in range(MAX_CONNECTIONS):
            refused = held.enter_context(connect(addresses.http))
            refused.sendall(trailer)
            assert error_of(read_all(refused))[0] == 400
        late = held.enter_context(connect(addresses.http))
        late.sendall(GET)
        assert late.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_failed_accept_is_tried_again(router_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [OSError(24, "Too many open files"), ConnectionAbortedError()]
    accept = socket.socket.accept

    def fail_first(listening: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop(0)
        return accept(listening)

    with router(router_model_dir) as addresses:
        monkeypatch.setattr(socket.socket, "accept", fail_first)
        with connect(addresses.http) as connection:
            connection.sendall(GET)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert not failures


def test_the_grpc_port_counts_connections_before_their_handshake(
    secure: RouterAddresses, certificates: Certificates
) -> None:
    silent = [connect(secure.grpc) for _ in range(MAX_CONNECTIONS)]
    time.sleep(0.2)
    with connect(secure.grpc) as late:
        assert is_closed(late)
    for connection in silent:
        connection.close()
    credentials = grpc.ssl_channel_credentials(Path(certificates.ca).read_bytes())
    with grpc.secure_channel(secure.grpc, credentials, [("grpc.ssl_target_name_override", "localhost")]) as channel:
        grpc.channel_ready_future(channel).result(20.0)
