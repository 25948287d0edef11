"""Pages between two processes over CUDA IPC, on one GPU and on two."""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection

import pytest
import torch

from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.kvcache.base import PageLayout
from tandem.kvtransfer.lanes.joined import JoinedSender
from tandem.kvtransfer.lanes.plan import plan_lanes
from tandem.kvtransfer.transports.opening import OpeningError, load_transports, open_end
from tandem.rpc.credentials import ClusterCredentials
from tests.fakes.page_layout import OpaqueLayout
from tests.gpu.conftest import visible_gpu

LAYOUT = OpaqueLayout(16, 2**18)
NUM_PAGES = 64
TIMEOUT_S = 60.0
# About 0.5 s, much longer than a copy.
SLEEP_CYCLES = 1_000_000_000


WHOLE = KvHeadLayout(num_layers=3, page_size=16, num_kv_heads=4, head_dim=64, dtype="bfloat16")


def receive(connection: Connection, visible: str, layouts: Sequence[PageLayout]) -> None:
    """Send the endpoint of a pool of each layout, then pages on request."""
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    pools = [CudaKvPool(layout, NUM_PAGES, torch.device("cuda", 0)) for layout in layouts]
    for pool in pools:
        nvlink = load_transports(["nvlink"], pool, "127.0.0.1", ClusterCredentials())["nvlink"]
        connection.send(asyncio.run(open_end(nvlink.open_receiver)).endpoint())
    while (asked := connection.recv()) is not None:
        number, page = asked
        connection.send(pools[number].memory[page].cpu())


@pytest.fixture(
    params=[
        pytest.param(0, id="one-gpu"),
        pytest.param(
            1, id="two-gpus", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return visible_gpu(request.param)


@pytest.fixture
def peer(device: str) -> Iterator[Connection]:
    with other_process(device, [LAYOUT]) as connection:
        yield connection


@contextmanager
def other_process(device: str, layouts: Sequence[PageLayout]) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=receive, args=(there, device, layouts))
    process.start()
    try:
        yield here
    finally:
        here.send(None)
        process.join(TIMEOUT_S)
    assert process.exitcode == 0


def test_pages_arrive_where_they_were_sent(peer: Connection) -> None:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    assert peer.poll(TIMEOUT_S)
    endpoint: bytes = peer.recv()
    pool = CudaKvPool(LAYOUT, NUM_PAGES, torch.device("cuda", 0))
    nvlink = load_transports(["nvlink"], pool, "127.0.0.1", ClusterCredentials())["nvlink"]
    # As in a worker: opened in its own thread, used in this one.
    sender = asyncio.run(open_end(lambda: nvlink.open_sender(endpoint)))
    pool.memory.random_(0, 256)
    pairs = {3: 60, 4: 2, 5: 3, 63: 0}
    torch.cuda.synchronize()
    # Later work does not delay pages that are already written.
    torch.cuda._sleep(SLEEP_CYCLES)
    later = torch.cuda.Event()
    later.record()
    completion = sender.copy_pages(0, list(pairs), list(pairs.values()))
    while not completion.done():
        assert not later.query()
    torch.cuda.synchronize()
    for page in range(NUM_PAGES):
        peer.send((0, page))
        assert peer.poll(TIMEOUT_S)
        sources = [src for src, dst in pairs.items() if dst == page]
        expected = pool.memory[sources[0]].cpu() if sources else torch.zeros(LAYOUT.page_bytes)
        assert torch.equal(peer.recv(), expected.to(torch.uint8)), page
    assert sender.abort().done()


@pytest.mark.parametrize("degrees", [(1, 2), (2, 1), (8, 2)], ids=str)
def test_heads_arrive_at_every_rank(device: str, degrees: tuple[int, int]) -> None:
    """The ranks of each end share a GPU, those of the receiver also a process."""
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    senders, receivers = ([WHOLE.shard(rank, degree) for rank in range(degree)] for degree in degrees)
    pages = torch.randint(0, 256, (NUM_PAGES, WHOLE.page_bytes), dtype=torch.uint8)
    pairs = {3: 60, 4: 2, 5: 3, 63: 0}
    with other_process(device, receivers) as peer:
        endpoints = []
        for _ in receivers:
            assert peer.poll(TIMEOUT_S)
            endpoints.append(peer.recv())
        pools = [CudaKvPool(layout, NUM_PAGES, torch.device("cuda", 0)) for layout in senders]
        ends = []
        for lane in plan_lanes([layout.heads for layout in senders], [layout.heads for layout in receivers]):
            pool = pools[lane.sender_rank]
            pool.memory.copy_(heads_of(pages, pool.layout))
            nvlink = load_transports(["nvlink"], pool, "127.0.0.1", ClusterCredentials())["nvlink"]
            endpoint = endpoints[lane.receiver_rank]
            open_sender = partial(nvlink.open_sender, endpoint, lane)
            ends.append(asyncio.run(open_end(open_sender)))
        torch.cuda.synchronize()
        copy = JoinedSender(ends).copy_pages(0, list(pairs), list(pairs.values()))
        deadline = time.monotonic() + TIMEOUT_S
        while not copy.done():
            assert time.monotonic() < deadline
        for number, layout in enumerate(receivers):
            for src, dst in pairs.items():
                peer.send((number, dst))
                assert peer.poll(TIMEOUT_S)
                assert torch.equal(peer.recv(), heads_of(pages[src : src + 1], layout)[0]), (number, src)
            peer.send((number, 1))
            assert peer.poll(TIMEOUT_S)
            assert not peer.recv().any()
        assert JoinedSender(ends).abort().done()


def heads_of(pages: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """A rank's heads of pages with all heads."""
    heads = layout.heads
    by_head = pages.view(len(pages), -1, heads.total, layout.head_bytes)
    return by_head[:, :, heads.first : heads.end].reshape(len(pages), -1)


def test_unmappable_pool_leads_to_another_transport(peer: Connection) -> None:
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    assert peer.poll(TIMEOUT_S)
    endpoint: bytes = peer.recv()
    for layout, told, reason in (
        (LAYOUT, endpoint[:8] + bytes(64), "cannot be mapped"),
        (LAYOUT, b"tcp", "3 bytes that are not an NVLink endpoint"),
        (OpaqueLayout(16, 3 * 2**16), endpoint, "does not consist of pages"),
    ):
        pool = CudaKvPool(layout, 2, torch.device("cuda", 0))
        nvlink = load_transports(["nvlink"], pool, "127.0.0.1", ClusterCredentials())["nvlink"]
        with pytest.raises(OpeningError, match=reason):
            asyncio.run(open_end(lambda nvlink=nvlink, told=told: nvlink.open_sender(told)))
    # No failed CUDA call is left for later checks.
    torch.cuda.synchronize()
