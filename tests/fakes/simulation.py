"""A whole cluster in one thread: real router, schedulers, caches, links and trackers; fake engines, sockets, copies and
time. Whatever can happen next (a step, a message on any stream, a copy, a fault) happens when the test says so.

What is checked all the time: page accounting of the worker concerned; that no copy writes a page which is not leased
to it; and by the fake engine's tokens, that every page holds what its readers think it holds.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from decode_worker.config import DecodeConfig
from decode_worker.scheduler import DecodeScheduler
from engine.kvcache.base import Completion
from engine.kvcache.cache_manager import CacheManager
from kvtransfer.events import (
    FromLink,
    ReceiverLinkClosed,
    ReceiverLinkOpened,
    SenderLinkClosed,
    SenderLinkFailed,
    SenderLinkOpened,
)
from kvtransfer.transports.base import COMPLETED, ReceiverTransport, SenderTransport
from kvtransfer.transports.shared_memory import SharedMemoryReceiver
from prefill_worker.config import PrefillConfig
from prefill_worker.handover import LinkHandover
from prefill_worker.scheduler import PrefillScheduler
from router.active_request import ActiveRequest
from router.config import RouterConfig
from router.policies.table import ROUTING_POLICIES
from router.router import Router
from router.tracker import RequestState
from router.worker import Worker
from tandem.lifecycle import RECEIVED
from tandem.messages import PROTOCOL_VERSION, Granted, Heartbeat, Hello, LinkHello, PageFormat, Peers
from tandem.sampling_params import SamplingParams
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine, expected_tokens
from tests.fakes.routing import CheckedPolicy
from tests.fakes.transport import ManualCompletion
from worker.base import Outbox, Scheduler
from worker.events import FromRouter, RouterLost
from worker.peer_union import PeerUnion

PAGE_SIZE = 2
# It is small, so that a schedule reaches it.
MAX_OVERTAKEN = 1
PAGE_FORMAT = PageFormat("fake", 1, "fake")
# This stands on a stream's queue where it ends.
END = object()


class SimTransport(SenderTransport):
    """Copies that happen one page at a time, in any order, whenever the simulation runs them: also after the receiver
    has noticed that the link is gone, and after the sender's death until that can be seen."""

    two_sided = False

    def __init__(self, source: "SimWorker", destination: "SimWorker") -> None:
        self.source, self.destination = source, destination
        # They are taken now, because a mapping outlives its process.
        self._from, self._to = source.engine.pool.memory, destination.engine.pool.memory
        self.pending: list[tuple[int, int, ManualCompletion]] = []

    @property
    def failure(self) -> str:
        return ""

    def copy_pages(self, link_seq: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> Completion:
        self.source.check_is_computed(src_pages)
        parts = [ManualCompletion() for _ in src_pages]
        self.pending += zip(src_pages, dst_pages, parts, strict=True)
        return _AllOf(parts)

    def abort(self) -> Completion:
        return _AllOf([part for _, _, part in self.pending])

    def run(self, index: int) -> None:
        src, dst, part = self.pending.pop(index)
        if self.destination.alive:
            self.destination.check_may_be_written(dst)
        self._to[dst].copy_(self._from[src])
        part.is_done = True


class SimChannel:
    """A two-sided connection of one epoch: the push and the expect of one number meet, one number after the other, and
    move their pages when the simulation says so."""

    def __init__(self, source: "SimWorker", destination: "SimWorker") -> None:
        self.source, self.destination = source, destination
        self.pushes: dict[int, tuple[list[int], ManualCompletion]] = {}
        self.expects: dict[int, tuple[list[int] | None, int, ManualCompletion]] = {}
        self.next_seq = 0
        self.sender_aborted = self.receiver_aborted = False
        self.receiver_stopped = ManualCompletion()

    @property
    def can_run(self) -> bool:
        # An aborted receiver may be in the middle of a transfer still.
        return (
            self.next_seq in self.pushes
            and self.next_seq in self.expects
            and not self.sender_aborted
            and not self.receiver_stopped.is_done
            and self.source.alive
        )

    def run(self) -> None:
        if not self.can_run:
            return
        src_pages, sent = self.pushes.pop(self.next_seq)
        dst_pages, num_pages, received = self.expects.pop(self.next_seq)
        assert num_pages == len(src_pages)
        for src, dst in zip(src_pages, dst_pages or (), strict=dst_pages is not None):
            if self.destination.alive:
                self.destination.check_may_be_written(dst)
            self.destination.engine.pool.memory[dst].copy_(self.source.engine.pool.memory[src])
        sent.is_done = received.is_done = True
        self.next_seq += 1

    def stop_receiver(self) -> None:
        self.receiver_stopped.is_done = True


class SimTwoSidedSender(SenderTransport):
    two_sided = True

    def __init__(self, channel: SimChannel) -> None:
        self._channel = channel

    @property
    def failure(self) -> str:
        return ""

    def copy_pages(self, link_seq: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> Completion:
        self._channel.source.check_is_computed(src_pages)
        sent = ManualCompletion()
        self._channel.pushes[link_seq] = (list(src_pages), sent)
        return sent

    def abort(self) -> Completion:
        self._channel.sender_aborted = True
        for _, sent in self._channel.pushes.values():
            sent.is_done = True
        return COMPLETED


class SimTwoSidedReceiver(ReceiverTransport):
    two_sided = True

    def __init__(self, channel: SimChannel) -> None:
        self._channel = channel

    @property
    def failure(self) -> str:
        return ""

    def endpoint(self) -> bytes:
        return b""

    def receive_pages(self, link_seq: int, dst_pages: Sequence[int] | None, num_pages: int) -> Completion:
        received = ManualCompletion()
        self._channel.expects[link_seq] = (None if dst_pages is None else list(dst_pages), num_pages, received)
        return received

    def abort(self) -> Completion:
        self._channel.receiver_aborted = True
        return self._channel.receiver_stopped


class _AllOf:
    def __init__(self, parts: list[ManualCompletion]) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.is_done for part in self._parts)


class SimOutbox(Outbox):
    def __init__(self, worker: "SimWorker") -> None:
        self._worker = worker

    def to_router(self, message: Any) -> None:
        if self._worker.connected:
            self._worker.to_router.append(message)

    def to_link(self, epoch: str, message: Any) -> None:
        if isinstance(message, Granted):
            self._worker.check_overtakes(message.lease_id)
        link = self._worker.simulation.links.get(epoch)
        if link is not None:
            link.queue_to(link.other(self._worker)).append(message)

    def close_link(self, epoch: str, reason: str) -> None:
        self._worker.simulation.links[epoch].cut()


class SimWorker:
    """One life of a worker process."""

    def __init__(self, simulation: "Simulation", worker_id: str, role: str, num_pages: int) -> None:
        self.simulation = simulation
        self.worker_id, self.role = worker_id, role
        self.incarnation = f"{worker_id}-life{next(simulation.numbers)}"
        self.engine = FakeEngine(
            num_pages,
            PAGE_SIZE,
            asynchronous=simulation.asynchronous,
            step_s=simulation.step_s,
        )
        self.cache = CacheManager(num_pages, PAGE_SIZE)
        self.alive = True
        self.paused = False
        # It says of a dead worker whether its end can be seen by others.
        self.seen_gone = False
        self.connected = False
        self.registered: Worker | None = None
        self.to_router: deque[Any] = deque()
        self.from_router: deque[Any] = deque()
        self.named = PeerUnion(simulation.clock)
        self.num_steps = 0
        outbox = SimOutbox(self)
        self.scheduler: Scheduler
        if role == "prefill":
            config = PrefillConfig(
                3, simulation.prefill_policy, min_shared_tokens=simulation.min_shared_tokens, grant_timeout_s=30.0
            )
            handover = LinkHandover(self.engine.pool.layout, outbox, simulation.clock, max_pages_in_flight=3)
            self.scheduler = PrefillScheduler(self.engine, self.cache, handover, outbox, config, simulation.clock)
        else:
            config = DecodeConfig(
                max_batch_size=3,
                lease_duration_s=20.0,
                max_overtaken=MAX_OVERTAKEN,
                max_waiting=simulation.max_waiting,
            )
            self.scheduler = DecodeScheduler(self.engine, self.cache, outbox, config, simulation.clock)

    @property
    def runs(self) -> bool:
        return self.alive and not self.paused

    def step(self) -> bool:
        self.num_steps += 1
        worked = self.scheduler.step()
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
        in_use = self.engine.pages_in_use
        assert not in_use & given_away, f"{self.incarnation}: a forward in flight has pages of somebody else"

    def check_may_be_written(self, page_id: int) -> None:
        """A page that another worker writes must be leased, or wait to be freed until such writes have ended."""
        leased = [h for h in self.cache._handles.values() if h.leased and page_id in h.page_ids[h.num_shared :]]
        deferred = [free for free in self.cache._deferred if page_id in free.page_ids]
        assert leased or deferred, f"{self.incarnation}: page {page_id} was written by a sender that has no lease on it"

    def check_is_computed(self, page_ids: Sequence[int]) -> None:
        """Pages may be read by a copy once everything that writes them has completed."""
        unwritten = self.engine.pages_to_write.intersection(page_ids)
        assert not unwritten, f"{self.incarnation}: pages {unwritten} are shipped before they are computed"

    def check_overtakes(self, lease_id: str) -> None:
        """A lease is granted before all who stand before it in line; nobody's are more than so many in its life."""
        assert isinstance(self.scheduler, DecodeScheduler)
        book = self.scheduler._leases
        for waiting in book._waiting._line:
            if waiting.lease_id == lease_id:
                break
            if waiting.lease_id in book._granted:
                continue
            request_id = waiting.request.request_id
            self.simulation.num_overtaken[request_id] += 1
            num_overtaken = self.simulation.num_overtaken[request_id]
            assert num_overtaken <= MAX_OVERTAKEN, f"{request_id} is overtaken for the {num_overtaken}th time"

    def connect(self) -> None:
        """Opens a control stream."""
        self.to_router.clear()
        self.from_router.clear()
        hello = Hello(
            PROTOCOL_VERSION,
            self.worker_id,
            self.incarnation,
            self.role,
            "cpu",
            "nowhere:1",
            1,
            PAGE_FORMAT,
            self.cache.num_pages,
            PAGE_SIZE,
        )
        self.connected = True
        stream = self.from_router
        self.registered = self.simulation.router.connect_worker(hello, stream.extend, lambda _: stream.append(END))

    def cut_unnamed_links(self) -> None:
        """Keeps links to those alone that the router names, or has named a little while ago."""
        named = {peer.incarnation for peer in self.named.peers()}
        for link in list(self.simulation.links.values()):
            if link.sender is self and link.receiver.incarnation not in named:
                link.cut()

    def receive_from_router(self) -> None:
        if not self.from_router:
            return
        message = self.from_router.popleft()
        if message is END:
            self.connected = False
            self.to_router.clear()
            self.from_router = deque()
            self.named.forget_router("router")
            self.scheduler.receive(RouterLost(self.simulation.router.incarnation))
        elif isinstance(message, Peers):
            self.named.set_named("router", message.decode_workers)
            self.cut_unnamed_links()
        else:
            self.scheduler.receive(FromRouter(message))
        self.check()


@dataclass(eq=False)
class SimLink:
    """One epoch. Each end notices its end when the END on its queue is delivered.

    Attributes:
        opening: the sender opens its end of the transport, and its engine thread knows of no epoch yet.
        sender_quiet: the sender's dialer may open the next epoch.
    """

    epoch: str
    sender: SimWorker
    receiver: SimWorker
    to_sender: deque[Any] = field(default_factory=deque)
    to_receiver: deque[Any] = field(default_factory=deque)
    opening: bool = True
    sender_open: bool = False
    receiver_open: bool = True
    sender_quiet: bool = False

    def other(self, worker: SimWorker) -> SimWorker:
        return self.receiver if worker is self.sender else self.sender

    def queue_to(self, worker: SimWorker) -> deque[Any]:
        return self.to_sender if worker is self.sender else self.to_receiver

    def cut(self) -> None:
        """The stream breaks; what was under way on it is lost."""
        is_open_at_sender = self.opening or self.sender_open
        for queue, is_open in ((self.to_sender, is_open_at_sender), (self.to_receiver, self.receiver_open)):
            queue.clear()
            if is_open:
                queue.append(END)

    def deliver(self, worker: SimWorker) -> None:
        if not self.queue_to(worker) or (self.opening and worker is self.sender):
            return
        message = self.queue_to(worker).popleft()
        if message is not END:
            if self.is_open_at(worker):
                worker.scheduler.receive(FromLink(self.epoch, message))
        elif worker is self.sender and self.sender_open:
            self.sender_open = False
            worker.scheduler.receive(SenderLinkClosed(self.epoch, "cut", self._set_quiet))
        elif worker is self.receiver and self.receiver_open:
            self.receiver_open = False
            worker.scheduler.receive(ReceiverLinkClosed(self.epoch))
        worker.check()

    def is_open_at(self, worker: SimWorker) -> bool:
        return self.sender_open if worker is self.sender else self.receiver_open

    def _set_quiet(self) -> None:
        self.sender_quiet = True


@dataclass(eq=False)
class SimClient:
    request: ActiveRequest
    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    cancelled: bool = False

    def read(self) -> None:
        self.tokens += self.request.tokens.take_tokens()
        assert self.tokens == self.expected[: len(self.tokens)], "a token is wrong, lost or repeated"
        self.ended = self.request.tokens.is_exhausted


class Simulation:
    """
    Attributes:
        links: epochs by name, until both ends have noticed their end.
        channels: of two-sided epochs, by name.
    """

    def __init__(
        self,
        num_prefill: int,
        num_decode: int,
        num_pages: int,
        prefill_policy: str,
        routing: str,
        two_sided: bool,
        asynchronous: bool = False,
        step_s: float = 0.0,
        min_shared_tokens: int = PAGE_SIZE,
        max_waiting: int = 1024,
    ) -> None:
        """
        Args:
            asynchronous: forwards of a worker overlap; each runs on its device when the simulation says so.
            step_s: how long a decode step is thought to take: 0 launches the next one at once.
            min_shared_tokens: as in PrefillConfig.
            max_waiting: as in DecodeConfig.
        """
        self.two_sided = two_sided
        self.asynchronous = asynchronous
        self.step_s = step_s
        self.min_shared_tokens = min_shared_tokens
        self.max_waiting = max_waiting
        # How often each request was overtaken where it stood in line for pages, over all of its attempts.
        self.num_overtaken: Counter[str] = Counter()
        self.channels: dict[str, SimChannel] = {}
        self.clock = FakeClock()
        self.numbers = itertools.count()
        self.prefill_policy = prefill_policy
        config = RouterConfig(
            "nowhere", "fake", 1000, heartbeat_timeout_s=1.0, stall_timeout_s=1e9, max_attempts=10_000
        )
        made: Any = ROUTING_POLICIES.load(routing)
        policy = made() if routing == "round_robin" else made(seed=0)
        self.policy = CheckedPolicy(policy)
        self.router = Router(config, self.policy, self.clock)
        self.num_pages = num_pages
        self.workers: dict[str, SimWorker] = {}
        self.dead: list[SimWorker] = []
        self.links: dict[str, SimLink] = {}
        self.transports: list[SimTransport] = []
        self.clients: list[SimClient] = []
        for role, count in (("prefill", num_prefill), ("decode", num_decode)):
            for i in range(count):
                self.start_worker(f"{role}{i}", role)
        while len(self.router.workers.candidates) < num_prefill * num_decode:
            for action in self.progress_actions():
                action()

    # --- This can happen by itself. ---

    def progress_actions(self) -> list[Callable[[], object]]:
        """Everything that goes on without a fault and without the clock: every one of these may be next. One that has
        become pointless by the time it is called does nothing."""
        actions: list[Callable[[], object]] = []
        for worker in self.workers.values():
            if worker.runs:
                actions.append(worker.step)
                if worker.from_router:
                    actions.append(worker.receive_from_router)
                if not worker.connected:
                    actions.append(worker.connect)
            if worker.to_router:
                actions.append(lambda w=worker: self.receive_from(w))
            # A stopped process's device goes on.
            if worker.engine.num_launched:
                actions.append(worker.run_device)
        for link in self.links.values():
            for end in (link.sender, link.receiver):
                if end.runs and link.queue_to(end) and not (link.opening and end is link.sender):
                    actions.append(lambda link=link, end=end: link.deliver(end))
            if link.opening and link.sender.runs:
                actions.append(lambda link=link: self.open_sender(link))
        for transport in self.transports:
            if not transport.source.seen_gone:
                for i in range(len(transport.pending)):
                    actions.append(lambda t=transport, i=i: t.run(min(i, len(t.pending) - 1)) if t.pending else None)
        for channel in self.channels.values():
            if channel.can_run:
                actions.append(channel.run)
            if channel.receiver_aborted and not channel.receiver_stopped.is_done:
                actions.append(channel.stop_receiver)
        actions += [lambda p=p, d=d: self.dial(p, d) for p, d in self.dialable()]
        actions += [lambda w=w: self.see_gone(w) for w in self.dead if not w.seen_gone]
        return actions

    def receive_from(self, worker: SimWorker) -> None:
        """The router reads a worker's stream."""
        if not worker.to_router:
            return
        message = worker.to_router.popleft()
        assert worker.registered is not None
        if message is END:
            self.router.lose_worker(worker.registered, "disconnected", "cut")
        elif self.router.workers.get(worker.worker_id) is worker.registered:
            self.router.receive(worker.registered, message)

    def dialable(self) -> Iterator[tuple[SimWorker, SimWorker]]:
        for sender in self.workers.values():
            if not sender.runs:
                continue
            for peer in sender.named.peers():
                receiver = self.workers.get(peer.worker_id)
                if receiver is None or not receiver.runs or receiver.incarnation != peer.incarnation:
                    continue
                # The next epoch opens only when this end has seen the old one closed and its copies completed.
                ours = [link for link in self.links.values() if (link.sender, link.receiver) == (sender, receiver)]
                if all(link.sender_quiet for link in ours):
                    yield sender, receiver

    def dial(self, sender: SimWorker, receiver: SimWorker) -> None:
        if (sender, receiver) not in self.dialable():
            return
        epoch = f"epoch{next(self.numbers)}"
        for old, link in list(self.links.items()):
            if link.sender_quiet and not link.receiver_open:
                del self.links[old]
        self.links[epoch] = SimLink(epoch, sender, receiver)
        hello = LinkHello(
            PROTOCOL_VERSION, sender.worker_id, sender.incarnation, 1, receiver.incarnation, PAGE_FORMAT, ("sim",)
        )
        transport: ReceiverTransport = SharedMemoryReceiver(receiver.engine.pool)
        if self.two_sided:
            channel = self.channels[epoch] = SimChannel(sender, receiver)
            transport = SimTwoSidedReceiver(channel)
        receiver.scheduler.receive(ReceiverLinkOpened(epoch, hello, transport, lambda: sender.seen_gone))
        receiver.check()

    def open_sender(self, link: SimLink) -> None:
        """The sender's end of the transport has opened, in a thread of its own. Where the link was cut meanwhile it may
        have failed: then the engine thread never hears of the epoch."""
        if not link.opening:
            return
        link.opening = False
        receiver = link.receiver
        if link.to_sender and next(self.numbers) % 2:
            link.to_sender.clear()
            link.sender_quiet = True
            failed = SenderLinkFailed(receiver.worker_id, receiver.incarnation, "cut")
            link.sender.scheduler.receive(failed)
            return
        link.sender_open = True
        transport: SenderTransport
        if self.two_sided:
            transport = SimTwoSidedSender(self.channels[link.epoch])
        else:
            transport = SimTransport(link.sender, link.receiver)
            self.transports.append(transport)
        opened = SenderLinkOpened(receiver.worker_id, receiver.incarnation, link.epoch, "sim", transport)
        link.sender.scheduler.receive(opened)

    def see_gone(self, worker: SimWorker) -> None:
        """A dead process is seen to have exited, and the settle time has passed: what it had submitted is over."""
        worker.seen_gone = True
        for transport in self.transports:
            if transport.source is worker:
                transport.pending.clear()

    # --- This is done by clients, by time and by faults. ---

    def submit(self, prompt_ids: list[int], max_tokens: int, priority: int = 0, stop_after: int | None = None) -> None:
        """Args: stop_after: the token after so many ends the output, if max_tokens does not."""
        expected = expected_tokens(prompt_ids, max_tokens)
        stop_token_ids: tuple[int, ...] = ()
        if stop_after is not None and stop_after < max_tokens:
            stop_token_ids = (expected[stop_after],)
            expected = expected[: expected.index(expected[stop_after]) + 1]
        sampling = SamplingParams(max_tokens, stop_token_ids=stop_token_ids)
        moments = {RECEIVED: int(self.clock.now * 1e9) + next(self.numbers)}
        tracker = self.router.make_tracker(prompt_ids, sampling, priority=priority, moments=moments)
        self.clients.append(SimClient(self.router.submit_request(tracker), expected))

    def cancel(self, client: SimClient) -> None:
        client.cancelled = client.ended = True
        self.router.close_request(client.request)

    def read_clients(self) -> None:
        for client in self.clients:
            if not client.ended:
                client.read()
                if client.ended:
                    self.router.close_request(client.request)

    def advance(self, seconds: float) -> None:
        """Time passes; who runs and is connected is heard of."""
        self.clock.advance(seconds)
        for worker in self.workers.values():
            if worker.runs and worker.connected and worker.registered is not None:
                self.router.workers.record_heard(worker.registered)
                self.router.workers.record_heartbeat(worker.registered, Heartbeat(worker.num_steps))
        self.router.check_deadlines()
        for worker in self.workers.values():
            if worker.runs:
                worker.cut_unnamed_links()

    def start_worker(self, worker_id: str, role: str) -> None:
        worker = self.workers[worker_id] = SimWorker(self, worker_id, role, self.num_pages)
        worker.connect()

    def kill(self, worker: SimWorker) -> None:
        """kill -9: its streams end, its copies may still land until its end is seen."""
        worker.alive = False
        del self.workers[worker.worker_id]
        self.dead.append(worker)
        assert worker.registered is not None
        self.router.lose_worker(worker.registered, "disconnected", "killed")
        for link in self.links.values():
            if worker in (link.sender, link.receiver):
                link.cut()
                if worker is link.sender:
                    link.opening = link.sender_open = False
                    link.sender_quiet = True
                else:
                    link.receiver_open = False

    def revive(self, worker: SimWorker) -> None:
        self.see_gone(worker)
        self.dead.remove(worker)
        self.start_worker(worker.worker_id, worker.role)

    def cut_control(self, worker: SimWorker) -> None:
        worker.to_router.clear()
        worker.to_router.append(END)
        worker.from_router.clear()
        worker.from_router.append(END)

    # --- This is the end. ---

    def drain(self, max_rounds: int = 3000) -> None:
        """No more faults: everything must come to rest, with every client served."""
        for worker in list(self.dead):
            self.revive(worker)
        for worker in self.workers.values():
            worker.paused = False
        for round_number in range(max_rounds):
            actions = self.progress_actions()
            for action in actions:
                action()
            self.read_clients()
            if round_number % 50 == 49:
                self.advance(0.5)
            if self._is_at_rest():
                return
        waiting = [(c.request.tracker.state, len(c.tokens)) for c in self.clients if not c.ended]
        raise AssertionError(f"no progress: {waiting} wait")

    def _is_at_rest(self) -> bool:
        if any(not c.ended for c in self.clients) or any(t.pending for t in self.transports):
            return False
        if any(link.queue_to(end) for link in self.links.values() for end in (link.sender, link.receiver) if end.alive):
            return False
        if any(w.from_router or w.to_router or not w.connected for w in self.workers.values()):
            return False
        if any(w.engine.num_launched for w in self.workers.values()):
            return False
        return all(self._is_idle(w) for w in self.workers.values())

    def _is_idle(self, worker: SimWorker) -> bool:
        stats = worker.scheduler.stats()
        return (stats.num_locked_pages, stats.num_leased_pages, stats.num_running, stats.num_queued) == (0, 0, 0, 0)

    def check_end(self) -> None:
        """Nobody was left out but for a reason, and nothing is left over."""
        for worker in self.workers.values():
            worker.check()
        for client in self.clients:
            tracker = client.request.tracker
            if client.cancelled:
                continue
            if tracker.state is RequestState.FAILED:
                # Nobody to serve it came back in a minute; or three workers died that served it, with little between.
                assert "nobody came within 60 s" in tracker.failure or (
                    tracker.failure == "given up: 3 workers were lost while they served it" and tracker.attempt >= 2
                )
            else:
                assert tracker.state is RequestState.FINISHED
                assert client.tokens == client.expected
        assert self.router.num_requests == 0
        assert not self.policy.violations and not self.policy.open_requests
        assert all(w.num_assigned == 0 and w.num_pending_tokens == 0 for w in self.router.workers)
