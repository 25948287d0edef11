"""Pages over NCCL between two processes, both ways at once, with peers that die or stall."""

import asyncio
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.kvcache.base import PageLayout
from tandem.kvtransfer.lanes.plan import Lane, plan_lanes
from tandem.kvtransfer.transports import peer_socket
from tandem.kvtransfer.transports.opening import OpeningError, load_transports, open_end
from tandem.rpc.credentials import ClusterCredentials
from tests.fakes.page_layout import OpaqueLayout
from tests.gpu.conftest import visible_gpu

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each end")

LAYOUT = OpaqueLayout(16, 2**18)
NUM_PAGES = 512
NUM_SOURCES = NUM_PAGES // 2
TIMEOUT_S = 60.0
NUM_TRANSFERS = 1000
NUM_AT_ONCE = 50


def serve_ends(pipe: Connection, visible: str, seed: int, layout: PageLayout, lane: Lane | None) -> None:
    """Run commands on the ends of a random pool, in a process with a GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    pool = CudaKvPool(layout, NUM_PAGES, torch.device("cuda", 0))
    torch.manual_seed(seed)
    pool.memory.random_(0, 256)
    torch.cuda.synchronize()
    nccl = load_transports(["nccl"], pool, "127.0.0.1", ClusterCredentials())["nccl"]
    sender: Any = None
    receiver: Any = None
    under_way: list[Any] = []

    def answer(question: tuple[Any, ...]) -> Any:
        nonlocal sender, receiver, under_way
        match question:
            case ("listen",):
                receiver = asyncio.run(open_end(lambda: nccl.open_receiver(lane)))
                return receiver.endpoint()
            case ("dial", endpoint):
                try:
                    sender = asyncio.run(open_end(lambda: nccl.open_sender(endpoint, lane)))
                except OpeningError as error:
                    return str(error)
                return ""
            case ("push", first_seq, transfers):
                under_way += [sender.copy_pages(seq, src, dst) for seq, (src, dst) in enumerate(transfers, first_seq)]
            case ("expect", first_seq, transfers):
                for seq, (dst, num_pages) in enumerate(transfers, first_seq):
                    under_way.append(receiver.receive_pages(seq, dst, num_pages))
            case ("wait",):
                _wait(lambda: all(one.done() for one in under_way))
                under_way = []
            case ("num_done",):
                return sum(one.done() for one in under_way)
            case ("failures",):
                return [end.failure for end in (sender, receiver) if end is not None]
            case ("abort",):
                started = time.monotonic()
                quiet = [end.abort() for end in (sender, receiver) if end is not None]
                _wait(lambda: all(one.done() for one in quiet))
                sender = receiver = None
                under_way = []
                return time.monotonic() - started
            case ("held",):
                names = [thread.name for thread in threading.enumerate()]
                return names.count("move-pages") + names.count("connect-nccl"), torch.cuda.memory_allocated()
            case ("pages", page_ids):
                return pool.memory[page_ids].cpu()
            case ("digests",):
                weights = torch.arange(1, layout.page_bytes + 1, device="cuda")
                return [int((page.to(torch.int64) * weights).sum()) for page in pool.memory]
        return None

    while (question := pipe.recv()) is not None:
        pipe.send(answer(question))


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.0005)


class Worker:
    def __init__(self, gpu: int, layout: PageLayout = LAYOUT, lane: Lane | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        arguments = (there, visible_gpu(gpu), gpu, layout, lane)
        self.process = context.Process(target=serve_ends, args=arguments, daemon=True)
        self.process.start()
        there.close()

    def ask(self, *question: Any) -> Any:
        self.tell(*question)
        return self.answer()

    def tell(self, *question: Any) -> None:
        self._pipe.send(question)

    def answer(self) -> Any:
        assert self._pipe.poll(TIMEOUT_S), "no answer"
        return self._pipe.recv()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
            self._pipe.send(None)
        self.process.join(TIMEOUT_S)


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)], ids=str)
def test_heads_of_a_lane_arrive_at_their_places(degrees: tuple[int, int]) -> None:
    whole = KvHeadLayout(num_layers=4, page_size=16, num_kv_heads=4, head_dim=128, dtype="bfloat16")
    senders, receivers = ([whole.shard(rank, degree) for rank in range(degree)] for degree in degrees)
    # Of the second rank.
    lane = plan_lanes([of.heads for of in senders], [to.heads for to in receivers])[1]
    sender = Worker(0, senders[lane.sender_rank], lane)
    receiver = Worker(1, receivers[lane.receiver_rank], lane)
    try:
        sources, destinations = list(range(0, NUM_PAGES, 2)), list(range(NUM_SOURCES))
        source, destination = (
            part.view(worker.ask("pages", page_ids).numpy())
            for part, worker, page_ids in (
                (lane.source(whole), sender, sources),
                (lane.destination(whole), receiver, destinations),
            )
        )
        assert not (source == destination).all()
        link(sender, receiver)
        sender.ask("push", 0, [(sources, destinations)])
        receiver.ask("expect", 0, [(destinations, len(destinations))])
        for worker in (sender, receiver):
            worker.ask("wait")
        arrived = lane.destination(whole).view(receiver.ask("pages", destinations).numpy())
        assert (arrived == source).all()
        for worker in (sender, receiver):
            worker.ask("abort")
    finally:
        for worker in (sender, receiver):
            worker.stop()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    """One per GPU; a test may replace them."""
    both = [Worker(0), Worker(1)]
    yield both
    for worker in both:
        worker.stop()
        assert worker.process.exitcode == 0


def link(sender: Worker, receiver: Worker) -> None:
    assert sender.ask("dial", receiver.ask("listen")) == ""


def endless() -> list[tuple[list[int], list[int]]]:
    """Pushes that take at least a second."""
    return [(list(range(NUM_SOURCES)), list(range(NUM_SOURCES, NUM_PAGES)))] * 4000


def push_all(sender: Worker, receiver: Worker, pushes: list[tuple[list[int], list[int]]]) -> None:
    receiver.ask("expect", 0, [(dst, len(dst)) for _, dst in pushes])
    sender.ask("push", 0, pushes)


def until_under_way(worker: Worker) -> None:
    _wait(lambda: worker.ask("num_done") > 20)


def test_random_transfers_both_ways_at_once(workers: list[Worker]) -> None:
    first, second = workers
    link(first, second)
    link(second, first)
    pages = {worker: worker.ask("digests") for worker in workers}
    sources = {worker: digests[:NUM_SOURCES] for worker, digests in pages.items()}
    rng = random.Random(0)
    for first_seq in range(0, NUM_TRANSFERS, NUM_AT_ONCE):
        for sender, receiver in ((first, second), (second, first)):
            pushes: list[tuple[list[int], list[int]]] = []
            expected: list[tuple[list[int] | None, int]] = []
            for _ in range(NUM_AT_ONCE):
                num_pages = rng.randint(1, rng.choice((4, NUM_SOURCES)))
                src = rng.sample(range(NUM_SOURCES), num_pages)
                dst = rng.sample(range(NUM_SOURCES, NUM_PAGES), num_pages)
                pushes.append((src, dst))
                # The receiver decides the destination and discards unwanted pages.
                is_wanted = rng.random() < 0.9
                expected.append((dst if is_wanted else None, num_pages))
                if is_wanted:
                    for one, other in zip(src, dst, strict=True):
                        pages[receiver][other] = sources[sender][one]
            for worker, question in (
                (receiver, ("expect", first_seq, expected)),
                (sender, ("push", first_seq, pushes)),
            ):
                worker.ask(*question)
        for worker in workers:
            worker.tell("wait")
        for worker in workers:
            worker.answer()
        if first_seq % (5 * NUM_AT_ONCE) == 0:
            assert {worker: worker.ask("digests") for worker in workers} == pages
    assert {worker: worker.ask("digests") for worker in workers} == pages
    assert [worker.ask("failures") for worker in workers] == [["", ""], ["", ""]]
    for worker in workers:
        worker.tell("abort")
    for worker in workers:
        assert worker.answer() < 5.0


@pytest.mark.parametrize("dies", ["sender", "receiver"])
def test_dead_peer_is_noticed_and_replaced(workers: list[Worker], dies: str) -> None:
    sender, receiver = workers
    link(sender, receiver)
    push_all(sender, receiver, endless())
    until_under_way(sender)
    dead, left = (sender, receiver) if dies == "sender" else (receiver, sender)
    number = workers.index(dead)
    dead.signal(signal.SIGKILL)
    dead.process.join(TIMEOUT_S)
    _wait(lambda: left.ask("failures") != [""])
    (failure,) = left.ask("failures")
    assert "page connection failed" in failure
    assert left.ask("abort") < 5.0
    if left is receiver:
        # No late page of the dead peer arrives.
        before = left.ask("digests")
        time.sleep(0.5)
        assert left.ask("digests") == before
    workers[number] = Worker(number)
    sender, receiver = workers
    link(sender, receiver)
    push_all(sender, receiver, [([1, 2, 3], [300, 301, 302])])
    for worker in workers:
        worker.ask("wait")
    assert receiver.ask("digests")[300:303] == sender.ask("digests")[1:4]


@pytest.mark.parametrize("stands", ["sender", "receiver"])
def test_stopped_peer_does_not_block_the_other_end(workers: list[Worker], stands: str) -> None:
    sender, receiver = workers
    link(sender, receiver)
    push_all(sender, receiver, endless())
    until_under_way(sender)
    still, other = (sender, receiver) if stands == "sender" else (receiver, sender)
    still.signal(signal.SIGSTOP)
    time.sleep(0.3)
    assert other.ask("abort") < 5.0
    before = other.ask("digests")
    still.signal(signal.SIGCONT)
    # On continuing it notices the end and leaves the other's pages alone.
    _wait(lambda: still.ask("failures") != [""])
    assert still.ask("abort") < 5.0
    assert other.ask("digests") == before
    link(sender, receiver)
    push_all(sender, receiver, [([4], [400])])
    for worker in workers:
        worker.ask("wait")
    assert receiver.ask("digests")[400] == sender.ask("digests")[4]


def told_and_gone(receiver: Worker) -> socket.socket:
    """Connect as a sender that gets NCCL's id but does not join."""
    connection = peer_socket.connect(receiver.ask("listen"))
    peer_socket.read_into(connection, memoryview(bytearray(128)))
    # The receiver is making the communicator.
    time.sleep(0.5)
    return connection


@pytest.mark.parametrize("dies", [True, False])
def test_sender_that_never_joins_leaks_no_thread_or_memory(workers: list[Worker], dies: bool) -> None:
    sender, receiver = workers
    link(sender, receiver)
    for worker in workers:
        worker.ask("abort")
    for _ in range(3):
        with told_and_gone(receiver) as connection:
            if dies:
                connection.close()
            _wait(lambda: receiver.ask("failures") != [""])
            (failure,) = receiver.ask("failures")
            assert ("closed the connection" if dies else "did not respond in time") in failure
            assert receiver.ask("abort") < 5.0
    _wait(lambda: receiver.ask("held")[0] == 0)
    assert receiver.ask("held")[1] < 2**20
    link(sender, receiver)
    push_all(sender, receiver, [([4], [400])])
    for worker in workers:
        worker.ask("wait")
    assert receiver.ask("digests")[400] == sender.ask("digests")[4]


@pytest.mark.parametrize("stands", ["sender", "receiver"])
def test_peer_stopped_while_connecting_is_given_up(workers: list[Worker], stands: str) -> None:
    """Stop at many moments of communicator creation, which takes about a second."""
    sender, receiver = workers
    link(sender, receiver)
    for worker in workers:
        worker.ask("abort")
    still, other = (sender, receiver) if stands == "sender" else (receiver, sender)
    for delay_s in (0.0, 0.02, 0.1, 0.3):
        sender.tell("dial", receiver.ask("listen"))
        time.sleep(delay_s)
        still.signal(signal.SIGSTOP)
        if other is sender:
            # The moment decides whether it was connected.
            sender.answer()
        else:
            time.sleep(5.0)
        assert other.ask("abort") < 5.0
        still.signal(signal.SIGCONT)
        if still is sender:
            sender.answer()
        assert still.ask("abort") < 5.0
        for worker in workers:
            _wait(lambda worker=worker: worker.ask("held")[0] == 0)
    link(sender, receiver)
    push_all(sender, receiver, [([4], [400])])
    for worker in workers:
        worker.ask("wait")
    assert receiver.ask("digests")[400] == sender.ask("digests")[4]


def test_end_without_a_peer_is_given_up(workers: list[Worker]) -> None:
    first, second = workers
    first.ask("listen")
    assert first.ask("abort") < 1.0
    endpoint = second.ask("listen")
    second.ask("abort")
    assert "no connection" in first.ask("dial", endpoint)
