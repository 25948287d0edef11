"""Pages from one process's pool into another's, over CUDA IPC: two GPUs where there are two, else one."""

import multiprocessing
import os
from multiprocessing.connection import Connection

import torch

from engine.kvcache.base import PageLayout
from tandem.messages import PoolEndpoint

LAYOUT = PageLayout(4, 16, 8, 128, "bfloat16")
NUM_PAGES = 64
TIMEOUT_S = 60.0
# About half a second, much longer than a copy.
SLEEP_CYCLES = 1_000_000_000


def receive(connection: Connection, visible: str) -> None:
    """A process with a pool: tells where it is, and what it holds whenever it is asked."""
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    from engine.kvcache.cuda_pool import CudaKvPool
    from kvtransfer.transports.nvlink import NvlinkReceiver

    pool = CudaKvPool(LAYOUT, NUM_PAGES, torch.device("cuda", 0))
    connection.send(NvlinkReceiver(pool).endpoint())
    while (page := connection.recv()) is not None:
        connection.send(pool.page_bytes_view[page].cpu())


def test_pages_arrive_where_they_were_sent() -> None:
    from engine.kvcache.cuda_pool import CudaKvPool
    from kvtransfer.transports.nvlink import NvlinkSender

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    visible = "1" if torch.cuda.device_count() > 1 else "0"
    process = context.Process(target=receive, args=(there, visible))
    process.start()
    try:
        assert here.poll(TIMEOUT_S)
        endpoint: PoolEndpoint = here.recv()
        pool = CudaKvPool(LAYOUT, NUM_PAGES, torch.device("cuda", 0))
        sender = NvlinkSender(pool, endpoint)
        pool.page_bytes_view.random_(0, 256)
        pairs = {3: 60, 4: 2, 5: 3, 63: 0}
        torch.cuda.synchronize()
        # What is launched after the pages were written does not hold them up.
        torch.cuda._sleep(SLEEP_CYCLES)
        later = torch.cuda.Event()
        later.record()
        completion = sender.push(0, list(pairs), list(pairs.values()))
        while not completion.done():
            assert not later.query()
        torch.cuda.synchronize()
        for page in range(NUM_PAGES):
            here.send(page)
            assert here.poll(TIMEOUT_S)
            sources = [src for src, dst in pairs.items() if dst == page]
            expected = pool.page_bytes_view[sources[0]].cpu() if sources else torch.zeros(LAYOUT.page_bytes)
            assert torch.equal(here.recv(), expected.to(torch.uint8)), page
        assert sender.abort().done()
    finally:
        here.send(None)
        process.join(TIMEOUT_S)
    assert process.exitcode == 0
