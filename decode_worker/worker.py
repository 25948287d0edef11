"""A decode worker: links in from the prefill workers, the decode scheduler on top of the engine."""

import time
from collections.abc import Callable

from decode_worker.scheduler import DecodeScheduler
from kvtransfer.streams import LinkServer
from kvtransfer.transports.factory import TransportFactory
from tandem.config import WorkerConfig
from tandem.engine.engine import Engine
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.messages import Hello
from tandem.worker.base import Outbox, Scheduler
from tandem.worker.events import Event
from tandem.worker.process import LinkStreams, WorkerRoom


def make_decode_scheduler(engine: Engine, cache: CacheManager, outbox: Outbox, config: WorkerConfig) -> DecodeScheduler:
    return DecodeScheduler(engine, cache, outbox, config.decode, time.monotonic)


class DecodeRoom(WorkerRoom):
    def build_scheduler(self, engine: Engine, cache: CacheManager, outbox: Outbox, config: WorkerConfig) -> Scheduler:
        return make_decode_scheduler(engine, cache, outbox, config)

    def build_links(
        self, engine: Engine, hello: Hello, config: WorkerConfig, post: Callable[[Event], None]
    ) -> LinkStreams:
        transports = TransportFactory(engine.pool, config.host, config.transports)
        return LinkServer(hello.incarnation, hello.page_format, transports, post)
