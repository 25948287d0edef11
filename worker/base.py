"""Interfaces of a worker's parts, for all roles: scheduler, outbox, links, role."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import grpc

from tandem.engine.base import EngineBase
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.ranks.config import RankConfig
from tandem.messages import Hello, LinkRank, Peer, ReceiverMessage, SenderMessage, WorkerMessage, WorkerStats
from tandem.page_changes import PageChanges
from tandem.pagestore.messages import StoreClientMessage
from tandem.recording import Recorder
from tandem.rpc.credentials import ClusterCredentials
from tandem.worker.adapter_uses import AdapterUses
from tandem.worker.config import WorkerConfig
from tandem.worker.events import Event
from tandem.worker.forward_timer import ForwardTimer
from tandem.worker.page_tier import PageTier
from tandem.worker.stats import worker_stats


class Outbox(Protocol):
    """Collects a scheduler's messages until the end of the step or `flush`."""

    def to_router(self, message: WorkerMessage) -> None:
        """Sends to the router of the message's request. Drops it if that router's stream has ended."""
        ...

    def to_link(self, epoch: str, message: SenderMessage | ReceiverMessage) -> None:
        """Sends to the other end of a link's epoch."""
        ...

    def close_link(self, epoch: str, reason: str) -> None:
        """Ends a broken epoch."""
        ...

    def to_store(self, epoch: str, message: StoreClientMessage) -> None:
        """Sends to the page store, unless the epoch of its session is over."""
        ...

    def flush(self) -> bool:
        """Sends all messages now, before a long forward pass. Returns whether there were any."""
        ...


class Scheduler(ABC):
    """Decides the next work of a worker. Called only by the engine thread."""

    @abstractmethod
    def receive(self, event: Event) -> None:
        """Takes an event. Launches no forward pass."""

    @abstractmethod
    def step(self) -> bool:
        """Runs at most one forward pass of each mode. Returns whether there was work."""

    @abstractmethod
    def next_deadline(self) -> float | None:
        """Returns the time on the scheduler's clock of the next step due without events."""

    @abstractmethod
    def stats(self) -> WorkerStats:
        """Returns the worker's statistics."""

    @abstractmethod
    def take_cache_changes(self) -> PageChanges:
        """Returns pages that entered or left the cache since the last call."""

    @abstractmethod
    def check_integrity(self) -> str:
        """Returns the first violation of page accounting, or ""."""


class ForwardScheduler(Scheduler):
    """Runs the forward passes of one mode. An asynchronous engine may leave one in flight after `step`."""

    def __init__(
        self,
        engine: EngineBase,
        cache: CacheManager,
        clock: Callable[[], float],
        recorder: Recorder | None,
        timer: ForwardTimer | None,
        adapters: AdapterUses | None,
    ) -> None:
        """Args: timer, adapters: the engine's; None if this is its only scheduler."""
        self._engine = engine
        self._launches = engine.launches
        self._cache = cache
        self._recorder = recorder or Recorder()
        self._timer = timer or ForwardTimer(engine.pool.device.type, clock, engine.experts)
        self._adapters = adapters or AdapterUses(engine.adapters, clock)

    def stats(self) -> WorkerStats:
        return worker_stats(self._engine, self._cache, self._timer, self.own_stats(), self._adapters.stats())

    def take_cache_changes(self) -> PageChanges:
        return self._cache.take_changes()

    def check_integrity(self) -> str:
        return self._cache.check_integrity()

    @abstractmethod
    def own_stats(self) -> WorkerStats:
        """Returns counts of this scheduler, without those of engine and cache."""

    def collect_launched(self) -> None:
        """Waits for all launched forward passes and handles their outputs."""
        self._launches.collect_all_but(0)


class LinkConnections(Protocol):
    """The gRPC side of a worker's links, on the asyncio thread."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds services to the worker's server."""
        ...

    def set_peers(self, peers: Sequence[Peer]) -> None:
        """Keeps links to exactly these peers."""
        ...

    def send(self, epoch: str, messages: Sequence[SenderMessage | ReceiverMessage]) -> None:
        """Sends messages on an epoch. Drops them if the epoch has ended."""
        ...

    def close_link(self, epoch: str, reason: str) -> None: ...

    def mapped_workers(self) -> list[str]:
        """Returns the workers whose memory is mapped, until their epoch's last copy completes. Callable from any
        thread."""
        ...

    async def stop(self) -> None: ...


class MessagePipe(Protocol):
    """Messages to another process and back, whole and in order. Callers keep two threads from using it together."""

    def send(self, message: bytes) -> None: ...

    def receive(self) -> Sequence[bytes]:
        """Returns the messages that have come. Never waits."""
        ...


class FollowerLinks(NamedTuple):
    """A follower, and messages to its lanes."""

    rank: LinkRank
    pipe: MessagePipe


class LaneDriver(Protocol):
    """Drives the lanes of a follower. Belongs to one thread."""

    @property
    def is_busy(self) -> bool:
        """Whether `poll` may have a report before the next message."""
        ...

    def obey(self, message: bytes) -> None:
        """Executes a command of the leader. Never waits."""
        ...

    def poll(self) -> Sequence[bytes]:
        """Returns reports to the leader. Raises RuntimeError: the process must end."""
        ...


class StoreConnection(ABC):
    """A worker's use of its node's page store."""

    @abstractmethod
    def build_tier(
        self,
        engine: EngineBase,
        cache: CacheManager,
        outbox: Outbox,
        stats: Callable[[], WorkerStats],
        followers: Sequence[MessagePipe] = (),
    ) -> PageTier:
        """Maps the region and builds the tier, on the engine thread. Without a region, that tier does nothing.

        Args:
            stats: returns the worker's latest statistics.
            followers: to the drivers of `build_follower` at the worker's other ranks.
        """

    @abstractmethod
    def build_follower(self, engine: EngineBase, ranks: RankConfig) -> LaneDriver:
        """Maps the region at another rank, to copy as the leader says. Called before the start, in a copy of this
        object."""

    @property
    @abstractmethod
    def is_up(self) -> bool:
        """Whether the worker uses the store now. Callable from any thread."""

    @abstractmethod
    def tiered(self, scheduler: Scheduler) -> Scheduler:
        """Returns a scheduler that runs the tier too."""

    @abstractmethod
    def start(self, hello: Hello, credentials: ClusterCredentials, post: Callable[[Event], None]) -> None:
        """Begins to keep a session with the store, on the asyncio thread."""

    @abstractmethod
    def send(self, epoch: str, messages: Sequence[StoreClientMessage]) -> None:
        """Sends messages in an epoch's session, on the asyncio thread. Drops them if it has ended."""

    @abstractmethod
    async def stop(self) -> None:
        """Ends the session."""

    @abstractmethod
    def close(self) -> None:
        """Waits for the copies and unmaps the region, once the engine thread has ended."""


class WorkerRole(ABC):
    """Builds the parts of a worker that depend on its role."""

    @property
    def has_links(self) -> bool:
        """Whether the worker may exchange requests with others over links."""
        return False

    @property
    def max_batch_size(self) -> int:
        """Maximum number of requests in a decode step; 0 without decode."""
        return 0

    def max_request_pages(self, num_pages: int, page_size: int, max_model_len: int) -> int:
        """Returns the pages of the largest request that a pool of `num_pages` accepts."""
        return num_pages

    @abstractmethod
    def build_scheduler(
        self,
        engine: EngineBase,
        cache: CacheManager,
        outbox: Outbox,
        config: WorkerConfig,
        recorder: Recorder,
        tier: PageTier | None = None,
    ) -> Scheduler:
        """Builds the scheduler, on the engine thread.

        Args:
            tier: the tier below the pool; None if there is none.
        """

    @abstractmethod
    def build_links(
        self,
        engine: EngineBase,
        hello: Hello,
        config: WorkerConfig,
        credentials: ClusterCredentials,
        post: Callable[[Event], None],
        followers: Sequence[FollowerLinks] = (),
    ) -> LinkConnections:
        """Builds the links, on the asyncio thread.

        Args:
            followers: the worker's other ranks, by rank.
        """

    @abstractmethod
    def build_lanes(
        self, engine: EngineBase, config: WorkerConfig, credentials: ClusterCredentials
    ) -> LaneDriver | None:
        """Builds the lanes of a follower, on their thread; None without links."""
