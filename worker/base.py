"""What every worker is made of, whatever its role: a scheduler, the outbox that speaks for it, and its links."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Protocol

import grpc

from engine.base import EngineBase
from engine.kvcache.cache_manager import CacheManager
from tandem.messages import Hello, Peer, ReceiverMessage, SenderMessage, WorkerMessage, WorkerStats
from worker.config import WorkerConfig
from worker.events import Event


class Outbox(Protocol):
    """Where schedulers put messages; they leave together, at the end of the step or at `flush`."""

    def to_router(self, message: WorkerMessage) -> None: ...

    def to_link(self, epoch: str, message: SenderMessage | ReceiverMessage) -> None: ...

    def close_link(self, epoch: str, reason: str) -> None:
        """Ends an epoch that cannot work."""
        ...

    def flush(self) -> None:
        """Sends what has been said so far: before a forward that would keep it waiting."""
        ...


class Scheduler(ABC):
    """What runs next on a worker. Called by the engine thread only, one call at a time."""

    @abstractmethod
    def receive(self, event: Event) -> None:
        """Takes an event; computes nothing yet."""

    @abstractmethod
    def step(self) -> bool:
        """Does what can be done now, one forward of each mode at most; returns whether there was anything to do."""

    @abstractmethod
    def next_deadline(self) -> float | None:
        """When, on the scheduler's clock, a step is due even if nothing arrives."""

    @abstractmethod
    def stats(self) -> WorkerStats: ...

    @abstractmethod
    def check_integrity(self) -> str:
        """Returns the first violation of page accounting, or ""."""


class ForwardScheduler(Scheduler):
    """Runs the forwards of one mode. On an asynchronous engine one may be in flight when a step returns."""

    def __init__(self, engine: EngineBase, cache: CacheManager) -> None:
        self._engine = engine
        self._cache = cache

    def stats(self) -> WorkerStats:
        return worker_stats(self._engine, self._cache, self.own_stats())

    def check_integrity(self) -> str:
        return self._cache.check_integrity()

    @abstractmethod
    def own_stats(self) -> WorkerStats:
        """What this scheduler counts itself; zero for what its engine and its cache count."""

    @abstractmethod
    def settle(self) -> None:
        """Waits for the forward that has been launched, if any, and passes on what it gave."""


_COUNTS = tuple(f.name for f in fields(WorkerStats) if f.name != "shipped")
_counts_of = attrgetter(*_COUNTS)


def worker_stats(engine: EngineBase, cache: CacheManager, *own: WorkerStats) -> WorkerStats:
    """The stats of a worker: what its engine and its cache count, and what each of its schedulers does."""
    shared = WorkerStats(
        num_total_pages=cache.num_pages,
        num_free_pages=cache.num_free_pages,
        num_cached_pages=cache.num_cached_pages,
        num_locked_pages=cache.num_locked_pages,
        num_leased_pages=cache.num_leased_pages,
        prompt_tokens_computed=engine.counters.prompt_tokens_computed,
        output_tokens_computed=engine.counters.output_tokens_computed,
    )
    counts = zip(*map(_counts_of, (shared, *own)), strict=True)
    return WorkerStats(
        **dict(zip(_COUNTS, map(sum, counts), strict=True)), shipped=tuple(s for part in own for s in part.shipped)
    )


class LinkConnections(Protocol):
    """The gRPC side of a worker's links; see kvtransfer. All on the asyncio thread."""

    def add_to(self, server: grpc.aio.Server) -> None: ...

    def set_peers(self, peers: Sequence[Peer]) -> None: ...

    def send(self, epoch: str, messages: Sequence[Any]) -> None: ...

    def close_link(self, epoch: str, reason: str) -> None: ...

    async def stop(self) -> None: ...


class WorkerRole(ABC):
    """What makes a worker a prefill, a decode or a combined one."""

    @abstractmethod
    def build_scheduler(
        self, engine: EngineBase, cache: CacheManager, outbox: Outbox, config: WorkerConfig
    ) -> Scheduler:
        """Makes the scheduler; on the engine thread."""

    @abstractmethod
    def build_links(
        self, engine: EngineBase, hello: Hello, config: WorkerConfig, post: Callable[[Event], None]
    ) -> LinkConnections:
        """Makes the gRPC side of the links; on the asyncio thread."""
