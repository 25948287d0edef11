"""A worker's use of its node's page store: the mapped region, the tier above it and the session."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from tandem.engine.base import EngineBase
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.ranks.config import RankConfig
from tandem.messages import PROTOCOL_VERSION, Hello, PageFormat, WorkerStats
from tandem.pagestore.client.base import RegionCopies
from tandem.pagestore.client.compute_time import expected_compute_s
from tandem.pagestore.client.cpu_copies import CpuRegionCopies
from tandem.pagestore.client.rank_copies import FollowerCopies, PagePart, PartCopies, RankCopies
from tandem.pagestore.client.session import StoreSession
from tandem.pagestore.client.tier import StoreTier
from tandem.pagestore.client.tiered_scheduler import TieredScheduler
from tandem.pagestore.messages import StoreClientMessage, StoreHello
from tandem.pagestore.region_client import begin_use, take_region
from tandem.rpc.credentials import ClusterCredentials
from tandem.worker.base import LaneDriver, MessagePipe, Outbox, Scheduler, StoreConnection
from tandem.worker.config import StoreAccess
from tandem.worker.events import Event
from tandem.worker.page_tier import NoTier, PageTier

logger = logging.getLogger(__name__)


class NodeStore(StoreConnection):
    def __init__(self, access: StoreAccess, cluster_token: str) -> None:
        self._access = access
        self._token = cluster_token
        self._region_id = ""
        self._copies: RegionCopies | None = None
        self._tier: PageTier = NoTier()
        self._session: StoreSession | None = None
        self._task: asyncio.Task[None] | None = None

    def build_tier(
        self,
        engine: EngineBase,
        cache: CacheManager,
        outbox: Outbox,
        stats: Callable[[], WorkerStats],
        followers: Sequence[MessagePipe] = (),
    ) -> PageTier:
        part = PagePart.of(engine.pool.layout, RankConfig(0, 1 + len(followers)))
        try:
            own = self._map(engine, part)
            self._copies = RankCopies(own, followers) if followers else own
        except (OSError, RuntimeError) as error:
            # Not tried again: a GPU registers memory only before it serves, and a lost owner has nothing to give.
            logger.warning("no memory of the page store: this worker serves without it until it restarts: %s", error)
            return self._tier
        self._tier = StoreTier(
            cache,
            engine.launches,
            self._copies,
            _key_format(engine, part),
            outbox.to_store,
            time.monotonic,
            lambda num_cached, num_new: expected_compute_s(stats(), num_cached, num_new),
            self._access.write_after,
        )
        return self._tier

    def build_follower(self, engine: EngineBase, ranks: RankConfig) -> LaneDriver:
        part = PagePart.of(engine.pool.layout, ranks)
        try:
            return FollowerCopies(self._map(engine, part), is_writer=part.is_writer)
        except (OSError, RuntimeError) as error:
            return FollowerCopies(None, is_writer=part.is_writer, failure=str(error))

    @property
    def is_up(self) -> bool:
        return self._session is not None and self._session.is_open

    def tiered(self, scheduler: Scheduler) -> Scheduler:
        return TieredScheduler(scheduler, self._tier)

    def start(self, hello: Hello, credentials: ClusterCredentials, post: Callable[[Event], None]) -> None:
        if self._copies is None:
            return
        own = StoreHello(
            PROTOCOL_VERSION,
            hello.worker_id,
            hello.incarnation,
            os.getpid(),
            hello.page_format,
            region_id=self._region_id,
            follower_pids=hello.follower_pids,
        )
        socket = Path(self._access.region_socket)
        begin = partial(begin_use, socket, self._token, self._region_id, hello.follower_pids)
        self._session = StoreSession(self._access.address, own, credentials, post, begin)
        self._task = asyncio.create_task(self._session.run())

    def send(self, epoch: str, messages: Sequence[StoreClientMessage]) -> None:
        if self._session is not None:
            self._session.send(epoch, messages)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()

    def _map(self, engine: EngineBase, part: PagePart) -> RegionCopies:
        """Maps the region, and registers it with the rank's GPU.

        Raises:
            OSError: no holder gives it, or there is no room in the address space.
            RuntimeError: the GPU refuses it.
        """
        taken = take_region(Path(self._access.region_socket), self._token)
        region, self._region_id = taken.region, taken.region_id
        try:
            mapped = region.map()
            part_bytes = engine.pool.layout.page_bytes
            num_parts = region.num_bytes // (part.num_parts * part_bytes) * part.num_parts
            parts = np.frombuffer(mapped, np.uint8, num_parts * part_bytes).reshape(num_parts, part_bytes)
            if engine.pool.device.type == "cuda":
                from tandem.engine.kvcache.cuda_pool import CudaKvPool
                from tandem.pagestore.client.cuda_copies import CudaRegionCopies

                assert isinstance(engine.pool, CudaKvPool)
                return PartCopies(CudaRegionCopies(engine.pool, parts), part)
            return PartCopies(CpuRegionCopies(engine.pool.memory.numpy(), parts), part)
        finally:
            region.close()


def _key_format(engine: EngineBase, part: PagePart) -> PageFormat:
    """Returns what keys depend on. Pages in another number of parts have other keys."""
    layout = engine.pool.layout.whole
    tag = layout.tag if part.num_parts == 1 else f"{layout.tag} in {part.num_parts} parts"
    return PageFormat(engine.model_fingerprint, layout.page_bytes, tag)
