"""Pages between two processes over CUDA IPC, on one GPU and on two."""

import asyncio
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from tandem.kvtransfer.transports.opening import OpeningError, load_transports, open_end
from tandem.rpc.credentials import ClusterCredentials
from tests.fakes.page_layout import OpaqueLayout

LAYOUT = OpaqueLayout(16, 2**18)
NUM_PAGES = 64
TIMEOUT_S = 60.0
# About 0.5 s, much longer than a copy.
SLEEP_CYCLES = 1_000_000_000


def receive(connection: Connection, visible: str) -> None:
    """Send a pool's endpoint, then its contents on request."""
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    from tandem.engine.kvcache.cuda_pool import CudaKvPool

    pool = CudaKvPool(LAYOUT, NUM_PAGES, torch.device("cuda", 0))
    nvlink = load_transports(["nvlink"], pool, "127.0.0.1", ClusterCredentials())["nvlink"]
    connection.send(asyncio.run(open_end(nvlink.open_receiver)).endpoint())
    while (page := connection.recv()) is not None:
        connection.send(pool.memory[page].cpu())


@pytest.fixture(
    params=[
        pytest.param("0", id="one-gpu"),
        pytest.param(
            "1", id="two-gpus", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
        ),
    ]
)
def peer(request: pytest.FixtureRequest) -> Iterator[Connection]:
    """The other process; it sends its endpoint first."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=receive, args=(there, request.param))
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
        peer.send(page)
        assert peer.poll(TIMEOUT_S)
        sources = [src for src, dst in pairs.items() if dst == page]
        expected = pool.memory[sources[0]].cpu() if sources else torch.zeros(LAYOUT.page_bytes)
        assert torch.equal(peer.recv(), expected.to(torch.uint8)), page
    assert sender.abort().done()


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
