"""What every worker is made of, whatever its role: a scheduler, the outbox that speaks for it, and its links."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc

from tandem.engine.base import EngineBase
from tandem.engine.kvcache.cache_changes import CacheChanges
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.messages import Hello, Peer, ReceiverMessage, SenderMessage, WorkerMessage, WorkerStats
from tandem.recording import Recorder
from tandem.rpc.credentials import ClusterCredentials
from tandem.worker.config import WorkerConfig
from tandem.worker.events import Event
from tandem.worker.forward_timer import ForwardTimer
from tandem.worker.stats import worker_stats


class Outbox(Protocol):
    """Where schedulers put messages; they leave together, at the end of the step or at `flush`."""

    def to_router(self, message: WorkerMessage) -> None:
        """Tells the router that it concerns; without a stream to that one the message is dropped, for its attempts have
        ended then."""
        ...

    def to_link(self, epoch: str, message: SenderMessage | ReceiverMessage) -> None:
        """Tells the other end of a link's epoch."""
        ...

    def close_link(self, epoch: str, reason: str) -> None:
        """Ends an epoch that cannot work."""
        ...

    def flush(self) -> bool:
        """Sends what has been said so far: before a forward that would keep it waiting. Returns whether there was
        anything."""
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
    def stats(self) -> WorkerStats:
        """What the worker tells of itself; read after every step."""

    @abstractmethod
    def take_cache_changes(self) -> CacheChanges | None:
        """Which pages have come into the worker's cache and gone since the last call; None: none have."""

    @abstractmethod
    def check_integrity(self) -> str:
        """Returns the first violation of page accounting, or ""."""


class ForwardScheduler(Scheduler):
    """Runs the forwards of one mode. On an asynchronous engine one may be in flight when a step returns."""

    def __init__(self, engine: EngineBase, cache: CacheManager, recorder: Recorder | None, timer: ForwardTimer) -> None:
        """Args: recorder: of the thread that calls; None: nobody can record what it does."""
        self._engine = engine
        self._launches = engine.launches
        self._cache = cache
        self._recorder = recorder or Recorder()
        self._timer = timer

    def stats(self) -> WorkerStats:
        return worker_stats(self._engine, self._cache, self._timer, self.own_stats())

    def take_cache_changes(self) -> CacheChanges | None:
        return self._cache.take_changes()

    def check_integrity(self) -> str:
        return self._cache.check_integrity()

    @abstractmethod
    def own_stats(self) -> WorkerStats:
        """What this scheduler counts itself; zero for what its engine and its cache count."""

    def collect_launched(self) -> None:
        """Waits for all forwards that have been launched on the engine, and has what they gave passed on."""
        self._launches.collect_all_but(0)


class LinkConnections(Protocol):
    """The gRPC side of a worker's links, on the asyncio thread. A worker is the end of links that dials, the end that
    serves (both in kvtransfer), or has none."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serves what other workers call, if there is something."""
        ...

    def set_peers(self, peers: Sequence[Peer]) -> None:
        """Keeps links to exactly these from now on."""
        ...

    def send(self, epoch: str, messages: Sequence[SenderMessage | ReceiverMessage]) -> None:
        """Sends on an epoch; what comes after its end is dropped, for nobody waits for it."""
        ...

    def close_link(self, epoch: str, reason: str) -> None:
        """Ends an epoch that cannot work."""
        ...

    def mapped_workers(self) -> list[str]:
        """Whose memory is mapped here: from the opening of an epoch until none of its copies runs any more. From any
        thread."""
        ...

    async def stop(self) -> None:
        """Ends all epochs."""
        ...


class WorkerRole(ABC):
    """What makes a worker one for prefill, for decode or for both. Its parts are made by different threads, when the
    engine is there."""

    @property
    def has_links(self) -> bool:
        """Whether a worker of role `both` hands over to other workers, and takes over from them."""
        return False

    @property
    def max_batch_size(self) -> int:
        """Requests in one decode step at most; 0: it decodes none."""
        return 0

    def max_request_pages(self, num_pages: int, page_size: int, max_model_len: int) -> int:
        """Pages of the largest request that a worker with a pool of `num_pages` takes."""
        return num_pages

    @abstractmethod
    def build_scheduler(
        self, engine: EngineBase, cache: CacheManager, outbox: Outbox, config: WorkerConfig, recorder: Recorder
    ) -> Scheduler:
        """Makes the scheduler; on the engine thread. Args: recorder: of what that thread does."""

    @abstractmethod
    def build_links(
        self,
        engine: EngineBase,
        hello: Hello,
        config: WorkerConfig,
        credentials: ClusterCredentials,
        post: Callable[[Event], None],
    ) -> LinkConnections:
        """Makes the gRPC side of the links; on the asyncio thread."""
