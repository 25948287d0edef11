"""A prefill worker: links out to the decode workers, the prefill scheduler on top of the engine."""

import time
from collections.abc import Callable

from kvtransfer.streams import LinkDialer
from kvtransfer.transports.base import SenderTransport
from kvtransfer.transports.shared_memory import SharedMemorySender
from prefill_worker.handover import LinkHandover
from prefill_worker.scheduler import PrefillScheduler
from tandem.config import WorkerConfig
from tandem.engine.engine import Engine
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.messages import Hello, LinkWelcome
from tandem.worker.base import Handover, Outbox, Scheduler
from tandem.worker.events import Event
from tandem.worker.process import LinkStreams, WorkerRoom


def make_prefill_scheduler(
    engine: Engine, cache: CacheManager, handover: Handover, outbox: Outbox, config: WorkerConfig
) -> PrefillScheduler:
    return PrefillScheduler(engine, cache, handover, outbox, config.prefill, time.monotonic)


class PrefillRoom(WorkerRoom):
    def build_scheduler(self, engine: Engine, cache: CacheManager, outbox: Outbox, config: WorkerConfig) -> Scheduler:
        def open_transport(welcome: LinkWelcome) -> SenderTransport:
            return SharedMemorySender(engine.pool, welcome.endpoint)

        handover = LinkHandover(cache.page_size, open_transport, outbox)
        return make_prefill_scheduler(engine, cache, handover, outbox, config)

    def build_links(self, engine: Engine, hello: Hello, post: Callable[[Event], None]) -> LinkStreams:
        return LinkDialer(hello.worker_id, hello.incarnation, hello.page_format, post)
