import contextlib
import socket
import threading
import time
from collections.abc import Callable

import pytest

from tandem.engine.kvcache.pool import CpuKvPool
from tandem.kvtransfer.transports import listener, peer_socket
from tandem.kvtransfer.transports.peer_socket import Endpoint
from tandem.kvtransfer.transports.tcp import TcpReceiver, TcpSender
from tests.fakes.engine import expected_tokens
from tests.fakes.page_layout import OpaqueLayout
from tests.fakes.workers import WorkerPair

LAYOUT = OpaqueLayout(4, 8192)


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.001)


def tcp_pair(num_pages: int = 16) -> tuple[CpuKvPool, CpuKvPool, TcpSender, TcpReceiver]:
    source, destination = CpuKvPool(LAYOUT, num_pages, "tcp-source"), CpuKvPool(LAYOUT, num_pages, "tcp-destination")
    receiver = TcpReceiver(destination, "127.0.0.1")
    return source, destination, TcpSender(source, receiver.endpoint()), receiver


def test_tcp_moves_pages_to_their_destinations() -> None:
    source, destination, sender, receiver = tcp_pair()
    for page in range(16):
        source.memory[page] = page + 1
    copies = [sender.copy_pages(0, [3, 0], [9, 9]), sender.copy_pages(1, [5], [9])]
    # The receiver decides the destination; unwanted pages are discarded.
    receives = [receiver.receive_pages(0, [1, 15], 2), receiver.receive_pages(1, None, 1)]
    copies.append(sender.copy_pages(2, [7], [9]))
    receives.append(receiver.receive_pages(2, [0], 1))
    wait_for(lambda: all(c.done() for c in [*copies, *receives]))
    assert [float(destination.memory[p].float().mean()) for p in (0, 1, 2, 15)] == [8, 4, 0, 1]
    assert sender.failure == receiver.failure == ""
    for end in (sender, receiver):
        over = end.abort()
        wait_for(over.done)


def test_aborting_a_waiting_receiver_is_quick() -> None:
    _, destination, sender, receiver = tcp_pair()
    receive = receiver.receive_pages(0, [1], 1)
    over = receiver.abort()
    wait_for(over.done, 2.0)
    assert not receive.done() and receiver.failure == ""
    assert not destination.memory.any()
    wait_for(sender.abort().done, 2.0)


@pytest.mark.parametrize("cls", [TcpSender, TcpReceiver])
def test_aborted_end_keeps_its_descriptor_for_its_thread(
    cls: type[TcpSender] | type[TcpReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reused descriptor would get another socket's bytes into pages."""
    is_moving, may_move = threading.Event(), threading.Event()

    def stand_still(*_: object) -> None:
        is_moving.set()
        may_move.wait(10.0)

    _, _, sender, receiver = tcp_pair()
    monkeypatch.setattr(cls, "_move", stand_still)
    end = sender if cls is TcpSender else receiver
    sender.copy_pages(0, [1], [1])
    receiver.receive_pages(0, [1], 1)
    assert is_moving.wait(5.0)
    assert end._connection is not None
    descriptor = end._connection.fileno()
    over = end.abort()
    others = [socket.socket() for _ in range(8)]
    assert descriptor not in [other.fileno() for other in others] and not over.done()
    may_move.set()
    wait_for(over.done)
    assert end._connection.fileno() == -1
    for other in others:
        other.close()
    wait_for((receiver if cls is TcpSender else sender).abort().done)


def test_lost_peer_is_a_failure() -> None:
    _, _, sender, receiver = tcp_pair()
    # Connect first: before that, the link's own stream reports the end.
    sender.copy_pages(0, [1], [1])
    wait_for(receiver.receive_pages(0, [1], 1).done)
    receiver.receive_pages(1, [1], 1)
    sender.abort()
    wait_for(lambda: "closed the connection" in receiver.failure)
    wait_for(receiver.abort().done)


def test_thread_error_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its pushes count as done and are committed without arrival."""

    def runs_out_of_memory(*_: object) -> None:
        raise MemoryError("no page of it is left")

    _, _, sender, receiver = tcp_pair()
    monkeypatch.setattr(TcpSender, "_move", runs_out_of_memory)
    push = sender.copy_pages(0, [1], [1])
    wait_for(push.done)
    assert "no page of it is left" in sender.failure
    for end in (sender, receiver):
        wait_for(end.abort().done)


def test_pushes_out_of_step_are_a_failure() -> None:
    _, _, sender, receiver = tcp_pair()
    receiver.receive_pages(0, [1, 2], 2)
    sender.copy_pages(0, [1], [1])
    wait_for(lambda: "was announced" in receiver.failure)
    for end in (sender, receiver):
        wait_for(end.abort().done)


def test_strangers_are_ignored_and_do_not_block_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "KNOCK_TIMEOUT_S", 0.1)
    source, destination = CpuKvPool(LAYOUT, 2, "from"), CpuKvPool(LAYOUT, 2, "to")
    source.memory[1] = 7
    receiver = TcpReceiver(destination, "127.0.0.1")
    endpoint = Endpoint.decode(receiver.endpoint())
    with (
        socket.create_connection((endpoint.host, endpoint.port)) as silent,
        socket.create_connection((endpoint.host, endpoint.port)) as slow,
        socket.create_connection((endpoint.host, endpoint.port)) as wrong,
    ):
        slow.sendall(endpoint.knock[:8])
        wrong.sendall(bytes(len(endpoint.token)))
        sender = TcpSender(source, endpoint.encode())
        copy, received = sender.copy_pages(0, [1], [0]), receiver.receive_pages(0, [0], 1)
        wait_for(lambda: copy.done() and received.done())
        for stranger in (silent, slow, wrong):
            stranger.settimeout(5.0)
            assert _is_closed(stranger)
    assert (int(destination.memory[0, 0]), sender.failure, receiver.failure) == (7, "", "")
    for end in (sender, receiver):
        wait_for(end.abort().done)


def test_aborting_a_receiver_during_a_stranger_s_connection_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "KNOCK_TIMEOUT_S", 0.5)
    receiver = TcpReceiver(CpuKvPool(LAYOUT, 2, "besieged"), "127.0.0.1")
    endpoint = Endpoint.decode(receiver.endpoint())
    with socket.create_connection((endpoint.host, endpoint.port)) as stranger:
        _drip(stranger, endpoint.knock, 0.2)
        over = receiver.abort()
        _drip(stranger, endpoint.knock, 1.0)
        wait_for(over.done, 2.0)


def _drip(stranger: socket.socket, knock: bytes, seconds: float) -> None:
    """Send a byte now and then until the listener closes."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            stranger.sendall(knock[:1])
            time.sleep(0.1)


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_an_unreachable_receiver_cannot_be_opened() -> None:
    source, _, sender, receiver = tcp_pair()
    endpoint = receiver.endpoint()
    for end in (sender, receiver):
        wait_for(end.abort().done)
    with pytest.raises(OSError, match=r"no connection to 127\.0\.0\.1:"):
        TcpSender(source, endpoint)


def test_silent_host_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_socket, "CONNECT_TIMEOUT_S", 0.1)
    # With a full backlog, the host stops answering.
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
        socket.socket() as first,
        socket.socket() as second,
    ):
        for waiting in (first, second):
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        time.sleep(0.05)
        endpoint = Endpoint("127.0.0.1", full.getsockname()[1], bytes(16))
        started = time.monotonic()
        with pytest.raises(OSError, match="timed out"):
            TcpSender(CpuKvPool(LAYOUT, 2, "unheard"), endpoint.encode())
        assert time.monotonic() - started < 2.0


def test_push_has_a_timeout() -> None:
    _, _, sender, receiver = tcp_pair()
    wait_for(receiver.abort().done)
    pushes = [sender.copy_pages(i, list(range(16)), list(range(16))) for i in range(100)]
    wait_for(lambda: bool(sender.failure))
    wait_for(lambda: all(push.done() for push in pushes))
    wait_for(sender.abort().done)


def test_foreign_address_cannot_be_listened_at() -> None:
    with pytest.raises(OSError):
        TcpReceiver(CpuKvPool(LAYOUT, 2, "not-ours"), "192.0.2.1")


def test_endpoint_is_decoded_or_refused() -> None:
    endpoint = Endpoint("127.0.0.1", 4000, b"0123456789abcdef")
    assert Endpoint.decode(endpoint.encode()) == endpoint
    for told in (b"", b"scripted", endpoint.encode()[:18] + b"\xff"):
        with pytest.raises(ValueError, match="not a TCP endpoint"):
            Endpoint.decode(told)
    for nowhere in (endpoint._replace(host=""), endpoint._replace(port=0)):
        with pytest.raises(ValueError, match="without host or port"):
            Endpoint.decode(nowhere.encode())


def test_tokens_over_tcp_match_the_model() -> None:
    pair = WorkerPair(open_sender=TcpSender, open_receiver=lambda pool: TcpReceiver(pool, "127.0.0.1"))
    prompts = {f"r{n}": list(range(n, 3 * n)) for n in (1, 5, 16, 33)}
    for request_id, prompt in prompts.items():
        pair.submit(request_id, prompt, max_tokens=6)

    def finished() -> bool:
        pair.turn()
        return all(len(pair.tokens(request_id)) == 6 for request_id in prompts)

    wait_for(finished)
    for request_id, prompt in prompts.items():
        assert pair.output(request_id) == expected_tokens(prompt, 6)
    pair.cut_link()
    pair.check_idle()
