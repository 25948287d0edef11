"""Two workers' use of one store process, over a real region; the test acts as their engine threads."""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem.deploy.host.ports import ReservedPorts
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.messages import PROTOCOL_VERSION, Hello, PageFormat, WorkerStats
from tandem.pagestore.client.node_store import NodeStore
from tandem.pagestore.client.tiered_scheduler import TieredScheduler
from tandem.pagestore.config import StoreConfig
from tandem.pagestore.region import GIB, Region
from tandem.pagestore.region_holder import RegionHolder
from tandem.pagestore.server.process import StoreProcess
from tandem.rpc.credentials import ClusterCredentials
from tandem.worker.config import StoreAccess
from tandem.worker.page_tier import NoTier, PrefetchKey
from tests.fakes.engine import FakeEngine
from tests.fakes.workers import ListOutbox

TOKEN = "token"
PAGE_SIZE = 4
NUM_PAGES = 3
PROMPT = list(range(NUM_PAGES * PAGE_SIZE))
KEY: PrefetchKey = ("request", 0, "prefill")


class Worker:
    """Attributes: cache, pool: of its engine."""

    def __init__(self, access: StoreAccess, worker_id: str) -> None:
        self._worker_id = worker_id
        self.engine = FakeEngine(16, PAGE_SIZE)
        self.cache = CacheManager(16, PAGE_SIZE)
        self.pool = self.engine.pool.memory.numpy()
        self._outbox = ListOutbox()
        self.store = NodeStore(access, TOKEN)
        self.tier = self.store.build_tier(self.engine, self.cache, self._outbox, WorkerStats)

    def start(self) -> None:
        layout = self.engine.pool.layout
        page_format = PageFormat(self.engine.model_fingerprint, layout.page_bytes, layout.tag)
        hello = Hello(
            PROTOCOL_VERSION, self._worker_id, self._worker_id, "both", "cpu", "", 0, page_format, 16, PAGE_SIZE
        )
        self.store.start(hello, ClusterCredentials(TOKEN), self.tier.receive)

    async def run_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10.0):
            while not condition():
                self.tier.settle()
                for epoch, message in self._outbox.store:
                    self.store.send(epoch, [message])
                self._outbox.store.clear()
                await asyncio.sleep(0.001)

    def compute(self, token_ids: list[int]) -> None:
        """Fills the pages of a prompt with their numbers in it."""
        handle = self.cache.acquire_pages(token_ids, len(token_ids), max_cached_len=0)
        assert handle is not None
        for number, page in enumerate(handle.page_ids):
            self.pool[page] = number + 1
        self.cache.cache_pages(handle, token_ids, len(token_ids))
        self.cache.release_pages(handle)

    async def close(self) -> None:
        await self.store.stop()
        self.store.close()


@asynccontextmanager
async def store(directory: Path) -> AsyncIterator[tuple[StoreAccess, StoreProcess]]:
    path, ports = directory / "region", ReservedPorts()
    holder = RegionHolder(path, TOKEN, Region.create(2**20, GIB))
    address = ports.reserve("127.0.0.1", 0, "host")
    port = int(address.rpartition(":")[2])
    process = StoreProcess(StoreConfig("store-0", str(path), "127.0.0.1", port, cluster_token=TOKEN))
    await asyncio.to_thread(process.start)
    try:
        yield StoreAccess(address, str(path)), process
    finally:
        await asyncio.to_thread(process.stop)
        holder.close()
        ports.close()


def test_what_one_worker_computed_another_loads(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with store(tmp_path) as (access, process):
            first, second = Worker(access, "first"), Worker(access, "second")
            for worker in (first, second):
                worker.start()
            first.compute(PROMPT)
            await first.run_until(lambda: _num_ready(process) == NUM_PAGES)
            assert first.store.is_up
            second.tier.prefetch(KEY, [*PROMPT, 99], "")
            await second.run_until(lambda: len(second.cache.peek(PROMPT)) == NUM_PAGES)
            assert second.tier.end(KEY).host == NUM_PAGES * PAGE_SIZE
            for number, page in enumerate(second.cache.peek(PROMPT)):
                assert set(second.pool[page].tolist()) == {number + 1}
            assert first.cache.check_integrity() == second.cache.check_integrity() == ""
            for worker in (first, second):
                await worker.close()

    asyncio.run(scenario())


def test_a_worker_without_a_region_serves_without_a_tier(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        with caplog.at_level(logging.WARNING):
            worker = Worker(StoreAccess("127.0.0.1:1", str(tmp_path / "none")), "worker")
        assert isinstance(worker.tier, NoTier)
        worker.start()
        worker.store.send("epoch", [])
        assert not worker.store.is_up
        await worker.close()

    asyncio.run(scenario())
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "no memory of the page store: this worker serves without it until it restarts: "
    )


def test_only_a_worker_that_opens_sessions_is_a_user_of_the_region(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with store(tmp_path) as (access, _):
            worker = Worker(access, "worker")
            assert users_of(access) == "()\n"
            worker.start()
            await worker.run_until(lambda: worker.store._session is not None and worker.store._session._has_begun)
            assert str(os.getpid()) in users_of(access)
            await worker.close()

    asyncio.run(scenario())


def users_of(access: StoreAccess) -> str:
    script = "import sys, pathlib\nfrom tandem.pagestore.region_client import take_region\n"
    script += f"print(take_region(pathlib.Path(sys.argv[1]), {TOKEN!r}, as_store=True).users)"
    command = [sys.executable, "-c", script, access.region_socket]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_region_that_cannot_be_used_has_no_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("the device refuses it")

    monkeypatch.setattr("tandem.pagestore.client.node_store.CpuRegionCopies", refuse)
    holder = RegionHolder(tmp_path / "region", TOKEN, Region.create(2**20, GIB))
    worker = Worker(StoreAccess("127.0.0.1:1", str(tmp_path / "region")), "worker")
    assert isinstance(worker.tier, NoTier)
    assert users_of(StoreAccess("127.0.0.1:1", str(tmp_path / "region"))) == "()\n"
    holder.close()


def test_the_scheduler_runs_the_tier(tmp_path: Path) -> None:
    scheduler: Any = object()
    access = StoreAccess("127.0.0.1:1", str(tmp_path / "none"))
    assert isinstance(NodeStore(access, TOKEN).tiered(scheduler), TieredScheduler)


def _num_ready(process: StoreProcess) -> int:
    stats = process._sessions.latest_stats
    return stats.num_ready if stats is not None else 0
