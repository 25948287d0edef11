"""Failures of the peer, NCCL or the device, with a fake NCCL and device.

The real ones are tested in tests/gpu/kvtransfer/transports/test_nccl.py.
"""

import ctypes
import gc
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.deploy.host.certificates import make_certificates
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.cache_manager import CacheManager, PageHandle
from tandem.engine.kvcache.page_part import PagePart
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.kvtransfer.lanes.plan import plan_lanes
from tandem.kvtransfer.transports import peer_socket
from tandem.kvtransfer.transports.listener import Listener
from tandem.prefill_worker.config import PrefillConfig
from tandem.rpc.credentials import ClusterCredentials
from tests.fakes.cuda_device import FakeStream, fake_cuda, stream_of
from tests.fakes.engine import expected_tokens
from tests.fakes.nccl import FakeNccl
from tests.fakes.page_layout import OpaqueLayout
from tests.fakes.workers import WorkerPair

PAGE_BYTES = 64
OPAQUE = OpaqueLayout(4, PAGE_BYTES)
UNIQUE_ID_BYTES = 128


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNccl]:
    fake = FakeNccl()
    ours = ("nccl", "nccl_mover", "nccl_communicator")
    with fake_cuda(fake.modules(), tuple(f"tandem.kvtransfer.transports.{name}" for name in ours)):
        from tandem.kvtransfer.transports import nccl_mover

        monkeypatch.setattr(nccl_mover, "SLOT_BYTES", 4 * PAGE_BYTES)
        monkeypatch.setattr(nccl_mover, "CONNECT_TIMEOUT_S", 1.0)
        yield fake
        fake.abort_hangs.clear()
        fake.peer_has_ended.set()


def pool(layout: PageLayout = OPAQUE) -> Any:
    memory = torch.zeros((64, layout.page_bytes), dtype=torch.uint8)
    return SimpleNamespace(layout=layout, device=torch.device("cpu"), memory=memory, address=memory.data_ptr())


def open_receiver(into: Any = None) -> Any:
    from tandem.kvtransfer.transports.nccl import NcclReceiver

    return NcclReceiver(into or pool(), "127.0.0.1")


def open_pair() -> tuple[Any, Any, Any, Any]:
    """Return two pools, the first random, and the ends between them."""
    from tandem.kvtransfer.transports.nccl import NcclSender

    source, destination = pool(), pool()
    source.memory.random_(1, 256)
    receiver = open_receiver(destination)
    return source, destination, NcclSender(source, "127.0.0.1", receiver.endpoint()), receiver


def wait_for(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.001)


def end(*ends: Any) -> None:
    for one in ends:
        wait_for(one.abort().done)
        wait_for(lambda one=one: not one._thread.is_alive(), 1.0)


def test_pages_arrive_in_pieces_and_in_order(fake: FakeNccl) -> None:
    source, destination, sender, receiver = open_pair()
    pushes = [sender.copy_pages(0, list(range(10)), [0] * 10), sender.copy_pages(1, [3], [0])]
    # Unwanted pages are received and discarded.
    receives = [receiver.receive_pages(0, list(range(20, 30)), 10), receiver.receive_pages(1, None, 1)]
    pushes.append(sender.copy_pages(2, [7], [9]))
    receives.append(receiver.receive_pages(2, [40], 1))
    wait_for(lambda: all(one.done() for one in [*pushes, *receives]))
    assert torch.equal(destination.memory[20:30], source.memory[0:10])
    assert torch.equal(destination.memory[40], source.memory[7])
    assert int(destination.memory.any(1).sum()) == 11 and (sender.failure, receiver.failure) == ("", "")
    end(sender, receiver)
    assert [communicator.aborted for communicator in fake.communicators] == [True, True]


class FakePartCopies:
    """PartCopies on the fake device."""

    def __init__(self, destination: PagePart, source: PagePart) -> None:
        self._parts = destination, source

    def copy(self, dst: int, dst_pages: Any, src: int, src_pages: Any, stream: int) -> None:
        def copy() -> bool:
            (to, of), pairs = self._parts, list(zip(dst_pages, src_pages, strict=True))
            for (to_page, of_page), piece in product(pairs, range(of.num_pieces)):
                to_address = dst + to_page * to.page_bytes + to.offset + piece * to.stride
                ctypes.memmove(
                    to_address, src + of_page * of.page_bytes + of.offset + piece * of.stride, of.piece_bytes
                )
            return True

        stream_of(stream).submit(copy)


@pytest.mark.parametrize("degrees", [(1, 2), (2, 1)])
def test_heads_of_a_lane_are_gathered_and_scattered(
    fake: FakeNccl, monkeypatch: pytest.MonkeyPatch, degrees: tuple[int, int]
) -> None:
    from tandem.kvtransfer.transports import nccl_mover
    from tandem.kvtransfer.transports.nccl import NcclReceiver, NcclSender

    whole_copies = nccl_mover.copies_between

    def copies_between(source: PagePart, destination: PagePart, device: torch.device) -> Any:
        if source.is_whole and destination.is_whole:
            return whole_copies(source, destination, device)
        return FakePartCopies(destination, source)

    monkeypatch.setattr(nccl_mover, "copies_between", copies_between)
    whole = KvHeadLayout(num_layers=1, page_size=2, num_kv_heads=2, head_dim=8, dtype="bfloat16")
    senders, receivers = ([pool(whole.shard(rank, degree)) for rank in range(degree)] for degree in degrees)
    for source in senders:
        source.memory.random_(1, 256)
    lanes = plan_lanes([of.layout.heads for of in senders], [to.layout.heads for to in receivers])
    assert len(lanes) == 2
    for lane in lanes:
        source, destination = senders[lane.sender_rank], receivers[lane.receiver_rank]
        receiver = NcclReceiver(destination, "127.0.0.1", lane=lane)
        sender = NcclSender(source, "127.0.0.1", receiver.endpoint(), lane=lane)
        # Pages are of unequal sizes, but the ends must agree on pieces: this is several.
        assert sender._slots.num_pages == receiver._slots.num_pages == 2
        moves = [sender.copy_pages(0, [3, 0, 5, 1, 2], [0] * 5), receiver.receive_pages(0, [20, 9, 1, 3, 7], 5)]
        wait_for(lambda moves=moves: all(one.done() for one in moves))
        sent, arrived = (
            part.view(of.memory.numpy())
            for part, of in ((lane.source(whole), source), (lane.destination(whole), destination))
        )
        assert (arrived[[20, 9, 1, 3, 7]] == sent[[3, 0, 5, 1, 2]]).all()
        end(sender, receiver)
    assert all(int(to.memory.any(1).sum()) == 5 and to.memory[[20, 9, 1, 3, 7]].all() for to in receivers)


def test_handshake_beside_nccl_is_encrypted(
    fake: FakeNccl, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tandem.kvtransfer.transports import nccl

    monkeypatch.setattr(nccl, "CudaKvPool", SimpleNamespace)
    source, destination = pool(), pool()
    source.memory.random_(1, 256)
    credentials = ClusterCredentials("", make_certificates())
    here, there = (nccl.Nccl(p, h, credentials) for p, h in ((source, "127.0.0.2"), (destination, "127.0.0.1")))
    receiver: Any = there.open_receiver()
    sender: Any = here.open_sender(receiver.endpoint())
    assert isinstance(sender._connection, ssl.SSLSocket) and isinstance(receiver._connection, ssl.SSLSocket)
    receives = [receiver.receive_pages(0, list(range(20, 30)), 10), receiver.receive_pages(1, [3], 1)]
    pushes = [sender.copy_pages(0, list(range(10)), [0] * 10), sender.copy_pages(1, [9], [0])]
    wait_for(lambda: all(one.done() for one in [*pushes, *receives]))
    assert torch.equal(destination.memory[20:30], source.memory[0:10])
    assert torch.equal(destination.memory[3], source.memory[9])
    end(sender)
    receiver.receive_pages(2, [1], 1)
    wait_for(lambda: "closed the connection" in receiver.failure)
    end(receiver)
    # The warning about NCCL's missing encryption is logged once.
    another = there.open_receiver()
    end(here.open_sender(another.endpoint()), another)
    assert ["in the clear" in message for message in caplog.messages].count(True) == 1


def test_pushes_out_of_step_are_a_failure(fake: FakeNccl) -> None:
    _, destination, sender, receiver = open_pair()
    receiver.receive_pages(0, [1, 2], 2)
    sender.copy_pages(0, [1], [1])
    wait_for(lambda: "was announced" in receiver.failure and sender.failure)
    end(sender, receiver)
    assert not destination.memory.any()


def met(receiver: Any, joins: bool = False) -> socket.socket:
    """Connect as a sender that gets the unique id but does not join. Args: joins: whether it announces its join."""
    connection = peer_socket.connect(receiver.endpoint())
    peer_socket.read_into(connection, memoryview(bytearray(UNIQUE_ID_BYTES)))
    if joins:
        connection.sendall(b"j")
        wait_for(lambda: receiver._communicator is not None)
    return connection


@pytest.mark.parametrize("joins", [False, True])
def test_sender_death_before_joining_is_noticed_at_once(fake: FakeNccl, joins: bool) -> None:
    receiver = open_receiver()
    met(receiver, joins).close()
    wait_for(lambda: "closed the connection" in receiver.failure, 0.4)
    end(receiver)
    assert len(fake.communicators) == joins


@pytest.mark.parametrize("joins", [False, True])
def test_sender_stalled_before_joining_is_given_up(fake: FakeNccl, joins: bool) -> None:
    receiver = open_receiver()
    with met(receiver, joins):
        wait_for(lambda: "did not respond in time" in receiver.failure)
        end(receiver)
    assert len(fake.communicators) == joins


def connecting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "connect-nccl"]


def test_late_communicator_is_aborted_unused(fake: FakeNccl) -> None:
    """The thread blocked in NCCL ends then."""
    receiver = open_receiver()
    with met(receiver, joins=True):
        end(receiver)
    (late,) = fake.communicators
    assert not late.aborted
    late._meeting.ranks.add(0)
    wait_for(lambda: late.aborted and not connecting_threads())
    assert not late.num_posted and receiver.failure == ""


def test_thread_blocked_in_nccl_ends_with_the_peer(fake: FakeNccl) -> None:
    receiver = open_receiver()
    with met(receiver, joins=True):
        end(receiver)
    assert connecting_threads()
    fake.peer_has_ended.set()
    wait_for(lambda: not connecting_threads())


def test_a_communicator_that_cannot_be_made_is_a_failure(fake: FakeNccl) -> None:
    fake.begin_error = RuntimeError("unhandled system error")
    receiver = open_receiver()
    with met(receiver, joins=True):
        wait_for(lambda: "unhandled system error" in receiver.failure)
        end(receiver)


def test_a_first_message_that_fails_as_it_is_asked_for_connects_nothing(fake: FakeNccl) -> None:
    from tandem.kvtransfer.transports.nccl_communicator import SENDER, Communicator

    is_asked = threading.Event()

    class Failing:
        def __init__(self, *args: Any) -> None:
            """Done at once."""

        def send(self, *args: Any) -> None:
            is_asked.wait(5.0)
            raise RuntimeError("unhandled system error")

    class Asked(Communicator):
        """Its thread ends during a check for failure."""

        @property
        def _error(self) -> Exception | None:
            error = vars(self).get("error")
            is_asked.set()
            wait_for(lambda: not connecting_threads())
            return error

        @_error.setter
        def _error(self, error: Exception | None) -> None:
            vars(self)["error"] = error

    nccl = SimpleNamespace(NcclCommunicator=Failing, NCCL_UINT8=1)
    communicator = Asked(nccl, SENDER, bytes(UNIQUE_ID_BYTES), torch.device("cpu"))
    assert not communicator.is_connected()
    with pytest.raises(RuntimeError, match="unhandled system error"):
        communicator.is_connected()


def test_receiver_stalled_before_sending_the_id_is_given_up(fake: FakeNccl) -> None:
    from tandem.kvtransfer.transports.nccl import NcclSender

    begun = []

    class Begun(NcclSender):
        def __init__(self, *args: Any) -> None:
            begun.append(self)
            super().__init__(*args)

    listener = Listener("127.0.0.1")
    with ThreadPoolExecutor(1) as receiver:
        accepted = receiver.submit(listener.accept)
        with pytest.raises(OSError, match=r"did not connect within|did not respond in time"):
            Begun(pool(), "127.0.0.1", listener.endpoint.encode())
        wait_for(lambda: not begun[0]._thread.is_alive(), 1.0)
        accepted.result().close()


def test_receiver_stalled_before_joining_is_given_up(fake: FakeNccl) -> None:
    from tandem.kvtransfer.transports.nccl import NcclSender

    listener = Listener("127.0.0.1")
    with ThreadPoolExecutor(1) as receiver:
        accepted = receiver.submit(listener.accept)

        class Told(NcclSender):
            def _meet_peer(self) -> None:
                accepted.result().sendall(bytes(UNIQUE_ID_BYTES))
                super()._meet_peer()

        with pytest.raises(OSError, match=r"did not connect within|did not respond in time|closed the connection"):
            Told(pool(), "127.0.0.1", listener.endpoint.encode())
        accepted.result().close()
    assert len(fake.communicators) == 1
    fake.peer_has_ended.set()
    wait_for(lambda: not connecting_threads())


def test_dead_epoch_frees_its_device_memory(fake: FakeNccl) -> None:
    """Even if an object of the epoch lives on."""
    _, _, sender, receiver = open_pair()
    slots = [weakref.ref(one._ring._slots) for one in (sender, receiver)]
    end(sender, receiver)
    gc.collect()
    assert [slot() for slot in slots] == [None, None]


def lease_under_receive(receiver: Any) -> tuple[CacheManager, PageHandle, Any]:
    """Return a cache, the pages of the link's only lease, and their completion."""
    cache = CacheManager(8, 4)
    handle = cache.acquire_pages(list(range(20)), 20, max_cached_len=0, leased=True)
    assert handle is not None
    receiver.receive_pages(0, handle.page_ids, len(handle.page_ids))
    wait_for(lambda: receiver._moves)
    return cache, handle, receiver.abort()


def test_failed_abort_frees_pages_once_streams_are_empty(fake: FakeNccl) -> None:
    _, _, sender, receiver = open_pair()
    fake.abort_error = RuntimeError("unhandled system error")
    cache, handle, quiet = lease_under_receive(receiver)
    cache.release_pages(handle, after=[quiet])
    wait_for(quiet.done)
    cache.free_deferred_pages()
    assert cache.num_free_pages == 8
    end(sender)


def test_lost_device_ends_the_engine_thread_and_frees_nothing(fake: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, _, receiver = open_pair()
    monkeypatch.setattr(FakeStream, "failure", "CUDA error: an illegal memory access was encountered")
    cache, handle, quiet = lease_under_receive(receiver)
    wait_for(lambda: not receiver._thread.is_alive())
    # The engine thread frees pages only this way and must not catch the error.
    with pytest.raises(RuntimeError, match="illegal memory access"):
        cache.release_pages(handle, after=[quiet])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        quiet.done()
    assert cache.num_free_pages == 3


def test_hanging_abort_is_given_up(fake: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.kvtransfer.transports import nccl_mover

    monkeypatch.setattr(nccl_mover, "ABORT_TIMEOUT_S", 0.3)
    _, _, _, receiver = open_pair()
    fake.abort_hangs.set()
    _, _, quiet = lease_under_receive(receiver)
    assert not quiet.done()

    def is_given_up() -> bool:
        try:
            assert not quiet.done()
        except RuntimeError as error:
            assert "did not end" in str(error)
            return True
        return False

    wait_for(is_given_up)


def test_stopped_process_time_does_not_count_for_an_abort(fake: FakeNccl) -> None:
    from tandem.kvtransfer.transports.nccl_mover import ABORT_TIMEOUT_S, _Quiet

    now = 0.0
    _, _, sender, receiver = open_pair()
    quiet = _Quiet(receiver, lambda: now)
    receiver._aborted = receiver._moves = True
    assert not quiet.done()
    now = 100 * ABORT_TIMEOUT_S
    assert not quiet.done()
    end(sender, receiver)


def test_cut_links_change_no_token_and_lose_no_page(fake: FakeNccl) -> None:
    from tandem.kvtransfer.transports.nccl import NcclReceiver, NcclSender

    def on_device(cpu_pool: CpuKvPool) -> Any:
        memory = cpu_pool.memory
        return SimpleNamespace(layout=cpu_pool.layout, device=torch.device("cpu"), address=memory.data_ptr())

    pair = WorkerPair(
        open_sender=lambda pool, endpoint: NcclSender(on_device(pool), "127.0.0.1", endpoint),
        open_receiver=lambda pool: NcclReceiver(on_device(pool), "127.0.0.1"),
        prefill={"config": PrefillConfig(8, min_shared_tokens=4)},
    )
    prompts = {f"r{n}": list(range(n, 4 * n)) for n in (5, 16, 33)}

    def turn_until(condition: Callable[[], Any]) -> None:
        def turned() -> Any:
            pair.turn()
            return condition()

        wait_for(turned, 10.0)

    def num_pushed() -> int:
        return sum(shipped.num_pages for shipped in pair.p.handover.shipped)

    for attempt in range(8):
        before = num_pushed()
        for request_id, prompt in prompts.items():
            pair.submit(request_id, prompt, max_tokens=4, attempt=attempt, cache_namespace=f"attempt {attempt}")
        if attempt < 7:
            turn_until(lambda before=before, attempt=attempt: num_pushed() > before + attempt)
            pair.cut_link()
            for request_id in prompts:
                pair.abort(request_id, attempt)
            pair.open_link()
    turn_until(lambda: all(len(pair.tokens(request_id, 7)) == 4 for request_id in prompts))
    for request_id, prompt in prompts.items():
        assert pair.output(request_id, 7) == expected_tokens(prompt, 4)
    pair.cut_link()
    turn_until(lambda: not pair.d.scheduler.stats().num_leased_pages and not pair.p.scheduler.stats().num_locked_pages)
    pair.check_idle()
    assert len(fake.communicators) == 16
    wait_for(lambda: all(communicator.aborted for communicator in fake.communicators))
