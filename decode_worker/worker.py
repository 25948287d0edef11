"""The decode role: a decode scheduler, and links from prefill workers."""

import time
from collections.abc import Callable, Sequence

from tandem.decode_worker.config import DecodeConfig
from tandem.decode_worker.scheduler import DecodeScheduler
from tandem.engine.base import EngineBase
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.kvtransfer.config import LinkConfig
from tandem.kvtransfer.lanes.follower import LaneFollower
from tandem.kvtransfer.lanes.ranks import LinkRanks
from tandem.kvtransfer.lanes.remote import RemoteRank
from tandem.kvtransfer.link_server import LinkServer
from tandem.kvtransfer.transports.opening import load_transports
from tandem.messages import Hello
from tandem.recording import Recorder
from tandem.rpc.credentials import ClusterCredentials
from tandem.worker.base import FollowerLinks, LaneDriver, LinkConnections, Outbox, Scheduler, WorkerRole
from tandem.worker.config import WorkerConfig
from tandem.worker.events import Event
from tandem.worker.page_tier import PageTier


class DecodeRole(WorkerRole):
    def __init__(self, decode: DecodeConfig, links: LinkConfig) -> None:
        self._decode = decode
        self._links = links

    @property
    def max_batch_size(self) -> int:
        return self._decode.max_batch_size

    def build_scheduler(
        self,
        engine: EngineBase,
        cache: CacheManager,
        outbox: Outbox,
        config: WorkerConfig,
        recorder: Recorder,
        tier: PageTier | None = None,
    ) -> Scheduler:
        return DecodeScheduler(engine, cache, outbox, self._decode, time.monotonic, recorder, tier=tier)

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
        return LinkServer(
            hello.incarnation,
            hello.page_format,
            LinkRanks.of(engine.pool, transports, [RemoteRank(*one) for one in followers]),
            post,
        )

    def build_lanes(
        self, engine: EngineBase, config: WorkerConfig, credentials: ClusterCredentials
    ) -> LaneDriver | None:
        return LaneFollower(load_transports(self._links.transports, engine.pool, config.host, credentials))
