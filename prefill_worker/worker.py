"""A prefill worker: links out to the decode workers, the prefill scheduler on top of the engine."""

import time
from collections.abc import Callable

from kvtransfer.streams import LinkDialer
from kvtransfer.transports.factory import TransportFactory
from prefill_worker.handover import LinkHandover
from prefill_worker.policies.registry import make_policy
from prefill_worker.scheduler import PrefillScheduler
from tandem.config import WorkerConfig
from tandem.engine.engine import Engine
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.messages import Hello
from tandem.worker.base import Handover, Outbox, Scheduler
from tandem.worker.events import Event
from tandem.worker.process import LinkStreams, WorkerRoom


def make_prefill_scheduler(
    engine: Engine, cache: CacheManager, handover: Handover, outbox: Outbox, config: WorkerConfig
) -> PrefillScheduler:
    policy = make_policy(config.prefill.policy)
    return PrefillScheduler(engine, cache, handover, outbox, config.prefill, policy, time.monotonic)


class PrefillRoom(WorkerRoom):
    def build_scheduler(self, engine: Engine, cache: CacheManager, outbox: Outbox, config: WorkerConfig) -> Scheduler:
        transports = TransportFactory(engine.pool, config.host, config.transports)
        handover = LinkHandover(engine.pool.layout, transports.open_sender, outbox)
        return make_prefill_scheduler(engine, cache, handover, outbox, config)

    def build_links(
        self, engine: Engine, hello: Hello, config: WorkerConfig, post: Callable[[Event], None]
    ) -> LinkStreams:
        transports = TransportFactory(engine.pool, config.host, config.transports)
        return LinkDialer(hello.worker_id, hello.incarnation, hello.page_format, transports, post, config.cluster_token)
