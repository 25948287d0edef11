"""The stop of a worker's process: copies end while their memory is still there."""

from collections.abc import Callable, Sequence

import pytest

from tandem.engine.base import EngineBase
from tandem.engine.config import EngineConfig
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.ranks.config import RankConfig
from tandem.kvtransfer.config import LinkConfig
from tandem.messages import Hello, WorkerStats
from tandem.pagestore.messages import StoreClientMessage
from tandem.prefill_worker.config import PrefillConfig
from tandem.prefill_worker.worker import PrefillRole
from tandem.rpc.credentials import ClusterCredentials
from tandem.worker.base import LaneDriver, MessagePipe, Outbox, Scheduler, StoreConnection
from tandem.worker.config import WorkerConfig
from tandem.worker.events import Event
from tandem.worker.page_tier import NoTier, PageTier
from tandem.worker.process import WorkerProcess
from tandem.worker.ranks import leader
from tests.fakes.engine import FakeEngine

TIMEOUT_S = 10.0


class Store(StoreConnection):
    """Attributes: on_close: called by `close`."""

    is_up = True
    on_close: Callable[[], None]

    def build_tier(
        self,
        engine: EngineBase,
        cache: CacheManager,
        outbox: Outbox,
        stats: Callable[[], WorkerStats],
        followers: Sequence[MessagePipe] = (),
    ) -> PageTier:
        return NoTier()

    def build_follower(self, engine: EngineBase, ranks: RankConfig) -> LaneDriver:
        raise NotImplementedError

    def tiered(self, scheduler: Scheduler) -> Scheduler:
        return scheduler

    def start(self, hello: Hello, credentials: ClusterCredentials, post: Callable[[Event], None]) -> None:
        pass

    def send(self, epoch: str, messages: Sequence[StoreClientMessage]) -> None:
        pass

    async def stop(self) -> None:
        pass

    def close(self) -> None:
        self.on_close()


def test_copies_are_ended_after_the_engine_thread_and_before_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    engine = FakeEngine(8, 4)
    monkeypatch.setattr(engine.pool, "close", lambda: order.append("pool"))
    monkeypatch.setattr(leader, "build_engine", lambda *_: engine)
    store = Store()
    config = WorkerConfig("prefill-0", "prefill", EngineConfig("m"), 16)
    worker = WorkerProcess(config, PrefillRole(PrefillConfig(), LinkConfig(("shared_memory",))), lambda _: None, store)
    thread = worker._engine_thread
    store.on_close = lambda: order.append(f"store, engine thread {'runs' if thread._thread.is_alive() else 'ended'}")
    thread.start()
    thread.wait_built(TIMEOUT_S)
    worker.stop()
    assert order == ["store, engine thread ended", "pool"]
