"""A decode worker: links in from the prefill workers, the decode scheduler on top of the engine."""

import time
from collections.abc import Callable

from decode_worker.scheduler import DecodeScheduler
from engine.engine import Engine
from engine.kvcache.cache_manager import CacheManager
from kvtransfer.streams import LinkServer
from kvtransfer.transports.factory import TransportFactory
from tandem.config import WorkerConfig
from tandem.messages import Hello
from worker.base import Outbox, Scheduler
from worker.events import Event
from worker.process import LinkConnections, WorkerRole


def make_decode_scheduler(engine: Engine, cache: CacheManager, outbox: Outbox, config: WorkerConfig) -> DecodeScheduler:
    return DecodeScheduler(engine, cache, outbox, config.decode, time.monotonic)


class DecodeRole(WorkerRole):
    def build_scheduler(self, engine: Engine, cache: CacheManager, outbox: Outbox, config: WorkerConfig) -> Scheduler:
        return make_decode_scheduler(engine, cache, outbox, config)

    def build_links(
        self, engine: Engine, hello: Hello, config: WorkerConfig, post: Callable[[Event], None]
    ) -> LinkConnections:
        transports = TransportFactory(engine.pool, config.host, config.transports)
        return LinkServer(hello.incarnation, hello.page_format, transports, post)
