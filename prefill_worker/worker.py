"""The prefill role: a prefill scheduler, and links to decode workers."""

import time
from collections.abc import Callable, Sequence

from tandem.engine.base import EngineBase
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.kvtransfer.config import LinkConfig
from tandem.kvtransfer.lanes.follower import LaneFollower
from tandem.kvtransfer.lanes.ranks import LinkRanks
from tandem.kvtransfer.lanes.remote import RemoteRank
from tandem.kvtransfer.link_dialer import LinkDialer
from tandem.kvtransfer.transports.opening import load_transports
from tandem.messages import Hello
from tandem.prefill_worker.config import PrefillConfig
from tandem.prefill_worker.handover import LinkHandover
from tandem.prefill_worker.scheduler import PrefillScheduler
from tandem.recording import Recorder
from tandem.rpc.credentials import ClusterCredentials
from tandem.worker.base import FollowerLinks, LaneDriver, LinkConnections, Outbox, Scheduler, WorkerRole
from tandem.worker.config import WorkerConfig
from tandem.worker.events import Event
from tandem.worker.page_tier import PageTier


class PrefillRole(WorkerRole):
    def __init__(self, prefill: PrefillConfig, links: LinkConfig) -> None:
        self._prefill = prefill
        self._links = links

    def build_scheduler(
        self,
        engine: EngineBase,
        cache: CacheManager,
        outbox: Outbox,
        config: WorkerConfig,
        recorder: Recorder,
        tier: PageTier | None = None,
    ) -> Scheduler:
        handover = LinkHandover(engine.pool.layout.whole, engine.launches, outbox, time.monotonic, recorder=recorder)
        return PrefillScheduler(engine, cache, handover, outbox, self._prefill, time.monotonic, recorder, tier=tier)

    def build_links(
        self,
        engine: EngineBase,
        hello: Hello,
        config: WorkerConfig,
        credentials: ClusterCredentials,
        post: Callable[[Event], None],
        followers: Sequence[FollowerLinks] = (),
    ) -> LinkConnections:
        transports = load_transports(self._links.transports, engine.pool, config.host, credentials)
        ranks = LinkRanks.of(engine.pool, transports, [RemoteRank(*one) for one in followers])
        return LinkDialer(hello.worker_id, hello.incarnation, hello.page_format, ranks, post, credentials)

    def build_lanes(
        self, engine: EngineBase, config: WorkerConfig, credentials: ClusterCredentials
    ) -> LaneDriver | None:
        return LaneFollower(load_transports(self._links.transports, engine.pool, config.host, credentials))
