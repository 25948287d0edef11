"""The TLS connection between two ends."""

import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch

from tandem.config import SERVER_NAME
from tandem.deploy.host.certificates import make_certificates
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.kvtransfer.transports import listener
from tandem.kvtransfer.transports.peer_socket import Endpoint
from tandem.kvtransfer.transports.tcp import TcpReceiver, TcpSender
from tandem.rpc.credentials import make_context
from tests.fakes.page_layout import OpaqueLayout
from tests.fakes.raw_sockets import is_closed

# A page spans many TLS records and ends inside one.
LAYOUT = OpaqueLayout(4, 300_004)
TLS, OTHER = make_certificates(), make_certificates()


def wait_for(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.001)


def client() -> ssl.SSLContext:
    return make_context(TLS, server_side=False)


def receiver_into(pool: CpuKvPool) -> TcpReceiver:
    return TcpReceiver(pool, "127.0.0.1", make_context(TLS, server_side=True))


@pytest.fixture
def pools() -> Iterator[tuple[CpuKvPool, CpuKvPool]]:
    source, destination = CpuKvPool(LAYOUT, 16, "tls-source"), CpuKvPool(LAYOUT, 16, "tls-destination")
    source.memory.random_(0, 256)
    yield source, destination
    for pool in (source, destination):
        pool.close()


def end(*ends: TcpSender | TcpReceiver) -> None:
    for one in ends:
        wait_for(one.abort().done)
        wait_for(lambda one=one: not one._thread.is_alive(), 2.0)


def test_pages_arrive_unchanged(pools: tuple[CpuKvPool, CpuKvPool]) -> None:
    source, destination = pools
    receiver = receiver_into(destination)
    sender = TcpSender(source, receiver.endpoint(), client())
    assert isinstance(sender._connection, ssl.SSLSocket) and sender._connection.version() == "TLSv1.3"
    copies = [sender.copy_pages(0, list(range(12)), [0] * 12), sender.copy_pages(1, [15], [0])]
    receives = [receiver.receive_pages(0, list(range(12)), 12), receiver.receive_pages(1, None, 1)]
    copies.append(sender.copy_pages(2, [14], [0]))
    receives.append(receiver.receive_pages(2, [13], 1))
    wait_for(lambda: all(one.done() for one in [*copies, *receives]))
    assert (sender.failure, receiver.failure) == ("", "")
    assert torch.equal(destination.memory[:12], source.memory[:12])
    assert torch.equal(destination.memory[13], source.memory[14])
    assert not destination.memory[12].any() and not destination.memory[14:].any()
    end(sender, receiver)


def test_abort_never_writes_ciphertext_into_pages(pools: tuple[CpuKvPool, CpuKvPool]) -> None:
    source, destination = pools
    source.memory.fill_(7)
    receiver = receiver_into(destination)
    sender = TcpSender(source, receiver.endpoint(), client())
    for number in range(40):
        sender.copy_pages(number, list(range(16)), list(range(16)))
        receiver.receive_pages(number, list(range(16)), 16)
    wait_for(lambda: destination.memory[3].any())
    end(receiver)
    assert set(destination.memory.unique().tolist()) <= {0, 7}
    # On a busy machine all pushes are over before the abort: only a later one can fail.
    numbers = count(40)
    wait_for(lambda: sender.failure or not sender.copy_pages(next(numbers), [0], [0]))
    end(sender)


def test_lost_peer_is_a_failure(pools: tuple[CpuKvPool, CpuKvPool]) -> None:
    source, destination = pools
    receiver = receiver_into(destination)
    sender = TcpSender(source, receiver.endpoint(), client())
    sender.copy_pages(0, [1], [1])
    wait_for(receiver.receive_pages(0, [1], 1).done)
    waits = receiver.receive_pages(1, [1], 1)
    end(sender)
    wait_for(lambda: "closed the connection" in receiver.failure)
    assert not waits.done()
    end(receiver)


def test_aborting_a_waiting_receiver_is_quick(pools: tuple[CpuKvPool, CpuKvPool]) -> None:
    receiver = receiver_into(pools[1])
    endpoint = Endpoint.decode(receiver.endpoint())
    with socket.create_connection((endpoint.host, endpoint.port)):
        time.sleep(0.05)
        wait_for(receiver.abort().done, 2.0)


def dial(endpoint: Endpoint) -> socket.socket:
    connection = socket.create_connection((endpoint.host, endpoint.port), 5.0)
    connection.settimeout(5.0)
    return connection


def silent(endpoint: Endpoint) -> socket.socket:
    return dial(endpoint)


def plain(endpoint: Endpoint) -> socket.socket:
    connection = dial(endpoint)
    connection.sendall(endpoint.token)
    return connection


def without_certificate(endpoint: Endpoint) -> socket.socket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=TLS.ca.decode())
    return over_tls(endpoint, context)


def with_anothers(endpoint: Endpoint) -> socket.socket:
    context = make_context(OTHER, server_side=False)
    context.load_verify_locations(cadata=TLS.ca.decode())
    return over_tls(endpoint, context)


def without_the_token(endpoint: Endpoint) -> socket.socket:
    connection = over_tls(endpoint, client())
    connection.sendall(secrets.token_bytes(16))
    return connection


def over_tls(endpoint: Endpoint, context: ssl.SSLContext) -> socket.socket:
    connection = dial(endpoint)
    connection.sendall(endpoint.knock)
    connection = context.wrap_socket(connection, server_hostname=SERVER_NAME)
    return connection


def knocking(endpoint: Endpoint) -> socket.socket:
    connection = dial(endpoint)
    connection.sendall(endpoint.knock)
    return connection


STRANGERS = {
    silent: "did not show the knock within 0.3 s",
    knocking: "did not show the token within 0.4 s",
    plain: "its knock is wrong",
    without_certificate: "peer did not return a certificate",
    with_anothers: "certificate verify failed",
    without_the_token: "its token is wrong",
}


def test_strangers_are_refused_with_a_reason_and_block_no_sender(
    pools: tuple[CpuKvPool, CpuKvPool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "KNOCK_TIMEOUT_S", 0.3)
    monkeypatch.setattr(listener, "TOKEN_TIMEOUT_S", 0.4)
    source, destination = pools
    receiver = receiver_into(destination)
    endpoint = Endpoint.decode(receiver.endpoint())
    with caplog.at_level(logging.WARNING):
        connections = [stranger(endpoint) for stranger in STRANGERS for _ in range(3)]
        for connection in connections:
            with connection:
                assert is_closed(connection)
        for reason in STRANGERS.values():
            assert sum(reason in message for message in caplog.messages) >= 3, reason
    began = time.monotonic()
    waiting = [silent(endpoint) for _ in range(5)]
    sender = TcpSender(source, endpoint.encode(), client())
    assert time.monotonic() - began < 0.25
    sender.copy_pages(0, [1], [0])
    wait_for(receiver.receive_pages(0, [0], 1).done)
    for connection in waiting:
        with connection:
            assert is_closed(connection)
    end(sender, receiver)


@pytest.mark.parametrize(
    ("shown", "reason"), [(OTHER, "certificate verify failed"), (None, "no TLS with"), (TLS, "")], ids=str
)
def test_sender_explains_a_refused_receiver(shown: object, reason: str) -> None:
    """The receiver is of another cluster or lacks TLS."""
    context = make_context(shown, server_side=True) if shown is not None else None  # type: ignore[arg-type]
    destination = CpuKvPool(LAYOUT, 2, "tls-wrong")
    receiver = TcpReceiver(destination, "127.0.0.1", context)
    if reason:
        with pytest.raises(OSError, match=reason):
            TcpSender(destination, receiver.endpoint(), client())
    else:
        end(TcpSender(destination, receiver.endpoint(), client()))
    end(receiver)


def test_sender_with_refused_certificate_gets_an_error() -> None:
    destination = CpuKvPool(LAYOUT, 2, "tls-refuses")
    receiver = receiver_into(destination)
    context = make_context(OTHER, server_side=False)
    context.load_verify_locations(cadata=TLS.ca.decode())
    with pytest.raises(OSError, match=r"no TLS with 127\.0\.0\.1:\d+: .*(unknown ca|decrypt error|bad certificate)"):
        TcpSender(destination, receiver.endpoint(), context)
    end(receiver)


def test_refused_strangers_leave_nothing_behind() -> None:
    destination = CpuKvPool(LAYOUT, 2, "tls-leaks")
    before = threading.active_count()
    for _ in range(3):
        receiver = receiver_into(destination)
        endpoint = Endpoint.decode(receiver.endpoint())
        for stranger in (plain, with_anothers):
            with stranger(endpoint) as connection:
                assert is_closed(connection)
        end(receiver)
    wait_for(lambda: threading.active_count() == before)
