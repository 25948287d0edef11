"""A prefill worker: links out to the decode workers, the prefill scheduler on top of the engine."""

import time
from collections.abc import Callable

from engine.engine import Engine
from engine.kvcache.cache_manager import CacheManager
from kvtransfer.streams import LinkDialer
from kvtransfer.transports.factory import TransportFactory
from prefill_worker.handover import LinkHandover
from prefill_worker.policies.registry import make_policy
from prefill_worker.scheduler import PrefillScheduler
from tandem.config import WorkerConfig
from tandem.messages import Hello
from worker.base import Handover, Outbox, Scheduler
from worker.events import Event
from worker.process import LinkConnections, WorkerRole


def make_prefill_scheduler(
    engine: Engine, cache: CacheManager, handover: Handover, outbox: Outbox, config: WorkerConfig
) -> PrefillScheduler:
    policy = make_policy(config.prefill.policy)
    return PrefillScheduler(engine, cache, handover, outbox, config.prefill, policy, time.monotonic)


class PrefillRole(WorkerRole):
    def build_scheduler(self, engine: Engine, cache: CacheManager, outbox: Outbox, config: WorkerConfig) -> Scheduler:
        transports = TransportFactory(engine.pool, config.host, config.transports)
        handover = LinkHandover(engine.pool.layout, transports.open_sender, outbox)
        return make_prefill_scheduler(engine, cache, handover, outbox, config)

    def build_links(
        self, engine: Engine, hello: Hello, config: WorkerConfig, post: Callable[[Event], None]
    ) -> LinkConnections:
        transports = TransportFactory(engine.pool, config.host, config.transports)
        return LinkDialer(hello.worker_id, hello.incarnation, hello.page_format, transports, post, config.cluster_token)
