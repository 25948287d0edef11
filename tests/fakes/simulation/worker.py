"""A simulated worker: real scheduler, cache and streams, and a fake engine."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tandem.both_worker.scheduler import BothScheduler
from tandem.both_worker.worker import make_both_scheduler
from tandem.decode_worker.config import DecodeConfig
from tandem.decode_worker.scheduler import DecodeScheduler
from tandem.decode_worker.speculation import NO_SPECULATION
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.messages import PROTOCOL_VERSION, Abort, GaveBack, Granted, Heartbeat, Hello, PageFormat, Peer
from tandem.peer_union import KEEP_S
from tandem.prefill_worker.config import PrefillConfig
from tandem.prefill_worker.handover import LinkHandover
from tandem.prefill_worker.scheduler import PrefillScheduler
from tandem.request_ids import router_of
from tandem.rpc.credentials import ClusterCredentials
from tandem.worker.base import Outbox, Scheduler
from tandem.worker.control_client import ControlClient
from tandem.worker.events import Event, FromRouter, RouterLost
from tandem.worker.records import RecordKeeper
from tandem.worker.router_streams import RouterStreams
from tests.fakes.ranked_engine import RankedEngine
from tests.fakes.simulation.drafter import PATH as HALF_RIGHT
from tests.fakes.simulation.streams import SimStream

if TYPE_CHECKING:
    from tests.fakes.simulation.cluster import Simulation

PAGE_SIZE = 2
# Small, so that schedules reach it.
MAX_OVERTAKEN = 1
PAGE_FORMAT = PageFormat("fake", 1, "fake")

AttemptKey = tuple[str, int]


class SimOutbox(Outbox):
    def __init__(self, worker: "SimWorker") -> None:
        self._worker = worker

    def to_router(self, message: Any) -> None:
        if isinstance(message, GaveBack):
            self._worker.given_back.append((message.request_id, message.attempt))
            self._worker.simulation.num_moves += message.is_move
        self._worker.routers.send([message])

    def to_link(self, epoch: str, message: Any) -> None:
        if isinstance(message, Granted):
            self._worker.check_overtakes(message.lease_id)
        link = self._worker.simulation.links.get(epoch)
        if link is not None:
            link.queue_to(link.other(self._worker)).append(message)

    def close_link(self, epoch: str, reason: str) -> None:
        link = self._worker.simulation.links.get(epoch)
        if link is not None:
            link.cut()

    def to_store(self, epoch: str, message: Any) -> None:
        raise AssertionError("there is no store")

    def flush(self) -> bool:
        return False


class SimWorker:
    """One life of a worker process.

    Attributes:
        inbox: router messages that its engine thread has not taken.
        streams: streams to routers, open at this end, by address.
    """

    def __init__(self, simulation: "Simulation", worker_id: str, role: str, num_pages: int) -> None:
        self.simulation = simulation
        self.worker_id, self.role = worker_id, role
        self.incarnation = f"{worker_id}-life{next(simulation.numbers)}"
        self.engine = RankedEngine(
            num_pages,
            PAGE_SIZE,
            num_ranks=simulation.num_ranks,
            asynchronous=simulation.asynchronous,
            step_s=simulation.step_s,
            sample=simulation.samples.sample,
            # One-token prompts run alone, so that every kind of forward pass occurs.
            min_mixed=2,
        )
        # Workers of role both reserve room for the largest request beside prompts for other workers.
        max_request_pages = simulation.largest_request_pages if role == "both" else num_pages
        self.cache = CacheManager(num_pages, PAGE_SIZE, max_request_pages=max_request_pages)
        self.alive = True
        self.paused = False
        # True once other workers can observe this dead worker's exit.
        self.seen_gone = False
        self.inbox: deque[Event] = deque()
        self.streams: dict[str, SimStream] = {}
        self.peers: Sequence[Peer] = ()
        self._last_named: dict[Peer, float] = {}
        self.num_steps = 0
        # Attempts given back in the current step.
        self.given_back: list[AttemptKey] = []
        outbox = SimOutbox(self)
        self.scheduler: Scheduler
        prefill = PrefillConfig(
            3, schedule=simulation.prefill_policy, min_shared_tokens=simulation.min_shared_tokens, grant_timeout_s=30.0
        )
        decode = DecodeConfig(
            max_batch_size=3,
            lease_duration_s=simulation.lease_duration_s,
            admit_grace_s=simulation.admit_grace_s,
            max_overtaken=MAX_OVERTAKEN,
            max_waiting=simulation.max_waiting,
            speculation=HALF_RIGHT if simulation.speculates else NO_SPECULATION,
        )
        if role == "prefill":
            layout, launches = self.engine.pool.layout, self.engine.launches
            handover = LinkHandover(layout, launches, outbox, simulation.clock, max_pages_in_flight=3)
            self.scheduler = PrefillScheduler(self.engine, self.cache, handover, outbox, prefill, simulation.clock)
        elif role == "decode":
            self.scheduler = DecodeScheduler(self.engine, self.cache, outbox, decode, simulation.clock)
        else:
            self.scheduler = make_both_scheduler(
                worker_id,
                self.engine,
                self.cache,
                outbox,
                prefill,
                decode,
                has_links=True,
                clock=simulation.clock,
                max_pages_in_flight=3,
            )
        both = self.scheduler
        self._schedulers: list[Scheduler] = [both._prefill, both._decode] if isinstance(both, BothScheduler) else [both]
        self._decode = next((part for part in self._schedulers if isinstance(part, DecodeScheduler)), None)
        hello = Hello(
            PROTOCOL_VERSION,
            worker_id,
            self.incarnation,
            role,
            "cpu",
            "nowhere:1",
            1,
            PAGE_FORMAT,
            num_pages,
            PAGE_SIZE,
            has_links=role == "both",
            max_request_pages=max_request_pages,
        )
        self.routers = RouterStreams(
            simulation.routers,
            hello,
            credentials=ClusterCredentials(),
            heartbeat=lambda: Heartbeat(self.num_steps),
            heartbeat_interval_s=1.0,
            connect_timeout_s=1e9,
            records=RecordKeeper(2**20),
            post=self.inbox.append,
            set_peers=self._set_peers,
            on_connected=lambda: None,
            clock=simulation.clock,
        )

    @property
    def runs(self) -> bool:
        return self.alive and not self.paused

    def step(self) -> bool:
        self.num_steps += 1
        while self.inbox:
            self._take_from_router(self.inbox.popleft())
        worked = self.scheduler.step()
        given_back, self.given_back = self.given_back, []
        assert not set(given_back) & self.running(), "a stream goes on that was given back"
        if any(changes := self.cache.take_changes()):
            self.routers.tell_changes(changes)
        self.check()
        return worked

    def run_device(self) -> None:
        if self.engine.num_launched:
            self.engine.run_next()

    def check(self) -> None:
        violation = self.scheduler.check_integrity()
        assert violation == "", f"{self.incarnation}: {violation}"
        given_away = set(self.cache._allocator.free_pages())
        for handle in self.cache._handles.values():
            given_away.update(handle.page_ids[handle.num_shared :] if handle.leased else ())
        if running := self.running():
            for other in self.simulation.workers.values():
                assert other is self or running.isdisjoint(other.running()), "an attempt runs on two workers"
        in_use = self.engine.pages_in_use
        assert not in_use & given_away, f"{self.incarnation}: a forward in flight has pages of somebody else"

    def check_may_be_written(self, page_id: int) -> None:
        """Check that another worker's write hits a leased page, or one whose freeing waits for such writes."""
        leased = [h for h in self.cache._handles.values() if h.leased and page_id in h.page_ids[h.num_shared :]]
        deferred = [free for free in self.cache._deferred if page_id in free.page_ids]
        assert leased or deferred, f"{self.incarnation}: page {page_id} was written by a sender that has no lease on it"

    def check_is_computed(self, page_ids: Sequence[int]) -> None:
        """Check that every write to the copied pages has completed."""
        unwritten = self.engine.pages_to_write.intersection(page_ids)
        assert not unwritten, f"{self.incarnation}: pages {unwritten} are shipped before they are computed"

    def check_overtakes(self, lease_id: str) -> None:
        """Check that a lease granted early overtakes no waiting lease more often than allowed."""
        assert self._decode is not None
        book = self._decode._leases
        if all(waiting.lease_id != lease_id for waiting in book._waiting._queue):
            # Its pages were kept for it, or they go ahead of a move, which may not overtake.
            is_ahead = bool(book._granted[lease_id].admit.copy_of)
            assert not (is_ahead and book._waiting._queue), "pages ahead of a move overtake a lease"
            return
        for waiting in book._waiting._queue:
            if waiting.lease_id == lease_id:
                break
            if waiting.lease_id in book._granted:
                continue
            request_id = waiting.request.request_id
            self.simulation.num_overtaken[request_id] += 1
            num_overtaken = self.simulation.num_overtaken[request_id]
            assert num_overtaken <= MAX_OVERTAKEN, f"{request_id} is overtaken for the {num_overtaken}th time"

    @property
    def unconnected(self) -> list[ControlClient]:
        return [client for client in self.routers._clients if client.address not in self.streams]

    def connect(self, client: ControlClient) -> None:
        router = self.simulation.routers[client.address]
        if router.alive and client.address not in self.streams:
            self.simulation.streams.append(SimStream(self, client, router))

    def note_named(self) -> None:
        """Record the named peers before they may change."""
        for stream in self.streams.values():
            self._last_named.update(dict.fromkeys(stream.named, self.simulation.clock.now))

    def look_at_time(self) -> None:
        """Run the asyncio thread's work of every 0.5 s."""
        self.note_named()
        self.routers._keep_links()
        for client in self.routers._clients:
            client.catch_up()

    def _set_peers(self, peers: Sequence[Peer]) -> None:
        self.peers = tuple(peers)
        kept = {peer.incarnation for peer in peers}
        for link in list(self.simulation.links.values()):
            if link.sender is self and link.receiver.incarnation not in kept:
                self._check_may_be_dropped(link.receiver)
                link.cut()

    def _check_may_be_dropped(self, receiver: "SimWorker") -> None:
        """Check that no router names the receiver, now or recently, unless it was restarted."""
        named = {peer for stream in self.streams.values() for peer in stream.named}
        assert receiver.incarnation not in {peer.incarnation for peer in named}, "a link that a router names is dropped"
        if receiver.worker_id not in {peer.worker_id for peer in named}:
            last = max(
                (t for peer, t in self._last_named.items() if peer.incarnation == receiver.incarnation), default=0
            )
            assert self.simulation.clock.now - last >= KEEP_S, "a link is dropped at once"
            self.simulation.num_forgotten_links += receiver.alive

    def attempts(self) -> set[AttemptKey]:
        return set[AttemptKey]().union(*map(_attempts, self._schedulers))

    def running(self) -> set[AttemptKey]:
        decode = self._decode
        return {(job.request_id, job.attempt) for job in decode._running} if decode is not None else set()

    def take(self, event: Event) -> None:
        """Take a link event, which may overtake an earlier router message."""
        self.scheduler.receive(event)
        self.check()

    def _take_from_router(self, event: Event) -> None:
        """Take a router event; if it ends attempts, it must end exactly the named ones."""
        ends: Callable[[AttemptKey], bool] | None = None
        if isinstance(event, RouterLost):
            lost = event.router
            ends = lambda key: router_of(key[0]) == lost  # noqa: E731
        elif isinstance(event, FromRouter) and isinstance(event.message, Abort):
            ended = event.message.request_id, event.message.attempt
            ends = lambda key: key == ended  # noqa: E731
        left = {key for key in self.attempts() if not ends(key)} if ends is not None else set()
        self.scheduler.receive(event)
        if ends is not None:
            assert self.attempts() == left, f"{self.incarnation}: {event} has ended {left ^ self.attempts()} wrongly"


def _attempts(scheduler: Scheduler) -> set[AttemptKey]:
    if isinstance(scheduler, PrefillScheduler):
        waiting = {queued.key for queued in scheduler._waiting._requests}
        return waiting | {job.key for job in scheduler._jobs()}
    assert isinstance(scheduler, DecodeScheduler)
    book = scheduler._leases
    leases = [lease for lease in (*book._granted.values(), *book._arriving) if not lease.abandoned]
    running = {(job.request_id, job.attempt) for job in scheduler._running}
    before_grant = {*book._admissions.attempts(), *book._waiting.attempts()}
    return running | before_grant | {lease.key for lease in leases}
