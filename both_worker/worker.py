"""A worker of role `both`: one scheduler of each kind over one engine and one pool, and no links."""

import time
from collections.abc import Callable, Sequence

import grpc

from both_worker.handover import LocalHandover
from both_worker.scheduler import BothScheduler
from decode_worker.config import DecodeConfig
from decode_worker.scheduler import DecodeScheduler
from engine.base import EngineBase
from engine.kvcache.cache_manager import CacheManager
from prefill_worker.config import PrefillConfig
from prefill_worker.scheduler import PrefillScheduler
from tandem.messages import Hello, Peer, ReceiverMessage, SenderMessage
from tandem.recording import Recorder
from worker.base import LinkConnections, Outbox, WorkerRole
from worker.config import WorkerConfig
from worker.events import Event


class NoLinks(LinkConnections):
    """A worker that ships nothing has no links."""

    def add_to(self, server: grpc.aio.Server) -> None: ...

    def set_peers(self, peers: Sequence[Peer]) -> None: ...

    def send(self, epoch: str, messages: Sequence[SenderMessage | ReceiverMessage]) -> None: ...

    def close_link(self, epoch: str, reason: str) -> None: ...

    def mapped_workers(self) -> list[str]:
        return []

    async def stop(self) -> None: ...


def make_both_scheduler(
    engine: EngineBase,
    cache: CacheManager,
    outbox: Outbox,
    prefill: PrefillConfig,
    decode: DecodeConfig,
    recorder: Recorder | None = None,
) -> BothScheduler:
    decode_scheduler = DecodeScheduler(engine, cache, outbox, decode, time.monotonic, recorder)
    handover = LocalHandover(decode_scheduler)
    prefill_scheduler = PrefillScheduler(engine, cache, handover, outbox, prefill, time.monotonic, recorder)
    return BothScheduler(engine, cache, prefill_scheduler, decode_scheduler)


class BothRole(WorkerRole):
    def __init__(self, prefill: PrefillConfig, decode: DecodeConfig) -> None:
        self._prefill = prefill
        self._decode = decode

    def build_scheduler(
        self, engine: EngineBase, cache: CacheManager, outbox: Outbox, config: WorkerConfig, recorder: Recorder
    ) -> BothScheduler:
        return make_both_scheduler(engine, cache, outbox, self._prefill, self._decode, recorder)

    def build_links(
        self, engine: EngineBase, hello: Hello, config: WorkerConfig, post: Callable[[Event], None]
    ) -> LinkConnections:
        return NoLinks()
