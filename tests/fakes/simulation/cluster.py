"""A whole cluster in one thread, with fake engines, sockets, copies and time.

The test chooses each next event: a step, a message on any stream, a copy, a fault.

Checked all the time:
- the page accounting of the affected worker;
- copies write only pages that are leased to their sender;
- every page holds the contents its readers expect, by the fake engine's tokens;
- every token of a client was sampled after exactly the tokens before it;
- the end of a router's attempts ends no other router's attempts;
- no link is dropped that a router names, or named recently.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from tandem.kvtransfer.events import ReceiverLinkOpened, SenderLinkFailed, SenderLinkOpened
from tandem.kvtransfer.lanes.joined import JoinedReceiver, JoinedSender
from tandem.kvtransfer.transports.base import ReceiverTransport, SenderTransport
from tandem.kvtransfer.transports.shared_memory import SharedMemoryReceiver
from tandem.lifecycle import now_ns
from tandem.messages import PROTOCOL_VERSION, LinkHello
from tandem.peer_union import KEEP_S
from tandem.request_ids import router_of
from tandem.router.workers.placement import AUTO
from tandem.worker.control_client import WELCOME_TIMEOUT_S
from tests.fakes.cached_identities import cached_identities
from tests.fakes.clock import FakeClock
from tests.fakes.simulation.client import SimClient
from tests.fakes.simulation.links import (
    SimChannel,
    SimLink,
    SimTransport,
    SimTwoSidedReceiver,
    SimTwoSidedSender,
    parts_of,
)
from tests.fakes.simulation.router import SimRouter
from tests.fakes.simulation.samples import Samples
from tests.fakes.simulation.streams import SimStream
from tests.fakes.simulation.worker import PAGE_FORMAT, PAGE_SIZE, SimWorker

ACCEPTED_FAILURES = (
    "nobody came within 60 s",
    "given up: 3 workers were lost while they served it",
    "nothing came for too long",
)


class Simulation:
    """
    Attributes:
        routers: the latest life of each router, possibly over, by address.
        streams, links: streams and epochs until both ends have noticed their end.
        channels: lanes of two-sided epochs, by name.
        leaving: workers that are to leave.
        num_moves: streams given back to move.
        num_forgotten_links: links dropped between living ends because no router named the receiver for too long.
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
        num_routers: int = 1,
        workers_have_time: bool = False,
        num_both: int = 0,
        largest_request_pages: int = 0,
        placement: str = AUTO,
        num_lanes: int = 1,
        num_ranks: int = 1,
        speculates: bool = False,
    ) -> None:
        """
        Args:
            num_ranks: of each worker; each holds a part of every page, and completes forward passes by itself.
            speculates: decode steps check drafts, right and wrong ones.
            num_lanes: lanes of each link: each carries a part of every page.
            largest_request_pages: pages of the largest request that workers of role both accept.
            asynchronous: forward passes overlap; each runs at the simulation's command.
            step_s: expected duration of a decode step; 0 launches the next one at once.
            workers_have_time: no lease expires, and none is refused for a missing Admit.
        """
        self.two_sided = two_sided
        self.asynchronous = asynchronous
        self.step_s = step_s
        self.min_shared_tokens = min_shared_tokens
        self.max_waiting = max_waiting
        self.lease_duration_s, self.admit_grace_s = (1e9, 1e9) if workers_have_time else (20.0, 2.0)
        # Times each request was overtaken in a queue, over all its attempts.
        self.num_overtaken: Counter[str] = Counter()
        self.num_lanes = num_lanes
        self.num_ranks = num_ranks
        self.speculates = speculates
        self.channels: dict[str, list[SimChannel]] = {}
        self.clock = FakeClock()
        self._began_at, self._began_ns = self.clock.now, now_ns()
        self.numbers = itertools.count()
        self.samples = Samples()
        self.num_forgotten_links = 0
        self.prefill_policy = prefill_policy
        self.num_pages = num_pages
        self.num_both = num_both
        self.largest_request_pages = largest_request_pages
        self._routing, self._placement = routing, placement
        self.leaving: set[str] = set()
        self.num_moves = 0
        self.routers = {address: self._new_router(address) for address in map("router{}".format, range(num_routers))}
        self.past_routers: list[SimRouter] = []
        self.workers: dict[str, SimWorker] = {}
        self.dead: list[SimWorker] = []
        self.streams: list[SimStream] = []
        self.links: dict[str, SimLink] = {}
        self.transports: list[SimTransport] = []
        self.clients: list[SimClient] = []
        self._unfinished: list[SimClient] = []
        for role, count in (("prefill", num_prefill), ("decode", num_decode), ("both", num_both)):
            for i in range(count):
                self.start_worker(f"{role}{i}", role)
        self._num_pairs = (num_prefill + num_both) * (num_decode + num_both)
        self._settle()

    def _new_router(self, address: str) -> SimRouter:
        return SimRouter(self, address, self._routing, self._placement)

    def progress_actions(self) -> list[Callable[[], object]]:
        """Return all possible next events except faults and clock changes.

        An action that has become pointless before its call does nothing.
        """
        actions: list[Callable[[], object]] = []
        for worker in self.workers.values():
            if worker.runs:
                actions.append(worker.step)
                actions += [lambda w=worker, c=c: w.connect(c) for c in worker.unconnected if self._answers(c.address)]
            # The device of a stopped process keeps running.
            if worker.engine.num_launched:
                actions.append(worker.run_device)
            actions += worker.engine.follower_actions()
        self.streams = [s for s in self.streams if not s.is_over]
        for stream in self.streams:
            if stream.to_worker and stream.worker.runs:
                actions.append(stream.deliver_to_worker)
            if stream.to_router and stream.router.runs:
                actions.append(stream.deliver_to_router)
        for router in self.routers.values():
            if router.runs and router.departed:
                actions.append(router.notice_departed)
            if router.runs and router.stood_still_s:
                actions.append(router.check_deadlines)
        for client in self._served_clients():
            if client.is_lost and (next_router := self._next_router(client.router)) is not None:
                actions.append(lambda c=client, r=next_router: c.send(r))
            elif client.has_waited_enough:
                actions.append(client.break_off)
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
        for channel in itertools.chain(*self.channels.values()):
            if channel.can_run:
                actions.append(channel.run)
            if channel.receiver_aborted and not channel.receiver_stopped.is_done:
                actions.append(channel.stop_receiver)
        actions += [lambda p=p, d=d: self.dial(p, d) for p, d in self.dialable()]
        actions += [lambda w=w: self.see_gone(w) for w in self.dead if not w.seen_gone]
        return actions

    def go_on(self, is_chosen: Callable[[int], bool] = lambda number: True) -> None:
        """Run the possible next events once, filtered by number."""
        for number, action in enumerate(self.progress_actions()):
            if is_chosen(number):
                action()
        self.read_clients()

    def plan_workers(self, leaving: set[str]) -> None:
        """Tell all routers that run that these workers leave, and no others; each of them tells its streams to move."""
        self.leaving = leaving
        for router in self.routers.values():
            if router.runs:
                router.plan_workers()

    def tell_counts(self) -> None:
        for router in self.routers.values():
            if router.runs:
                router.tell_counts()

    def dialable(self) -> Iterator[tuple[SimWorker, SimWorker]]:
        for sender in self.workers.values():
            if not sender.runs:
                continue
            for peer in sender.peers:
                receiver = self.workers.get(peer.worker_id)
                if (
                    receiver is sender
                    or receiver is None
                    or not receiver.runs
                    or receiver.incarnation != peer.incarnation
                ):
                    continue
                # The next epoch opens only after this end has seen the old one closed and its copies complete.
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
            PROTOCOL_VERSION, sender.worker_id, sender.incarnation, receiver.incarnation, PAGE_FORMAT, ("sim",), ()
        )
        transport: ReceiverTransport = SharedMemoryReceiver(receiver.engine.pool)
        if self.two_sided:
            channels = self.channels[epoch] = [SimChannel(sender, receiver, part) for part in self._parts(sender)]
            transport = JoinedReceiver([SimTwoSidedReceiver(channel) for channel in channels])
        receiver.take(ReceiverLinkOpened(epoch, hello, transport, lambda: sender.seen_gone))

    def open_sender(self, link: SimLink) -> None:
        """Finish opening the sender's end; if the link was cut, the engine thread may never hear of it."""
        if not link.opening:
            return
        link.opening = False
        receiver = link.receiver
        if link.to_sender and next(self.numbers) % 2:
            link.to_sender.clear()
            link.sender_quiet = True
            failed = SenderLinkFailed(receiver.worker_id, receiver.incarnation, "cut")
            link.sender.take(failed)
            return
        link.sender_open = True
        transport: SenderTransport
        if self.two_sided:
            transport = JoinedSender([SimTwoSidedSender(channel) for channel in self.channels[link.epoch]])
        else:
            lanes = [SimTransport(link.sender, link.receiver, part) for part in self._parts(link.sender)]
            self.transports += lanes
            transport = JoinedSender(lanes)
        opened = SenderLinkOpened(receiver.worker_id, receiver.incarnation, link.epoch, "sim", transport)
        link.sender.take(opened)

    def _parts(self, worker: SimWorker) -> list[slice]:
        return parts_of(worker.engine.pool.layout.page_bytes, self.num_lanes)

    def see_gone(self, worker: SimWorker) -> None:
        """Observe a dead process's exit: its submitted copies are over."""
        worker.seen_gone = True
        for transport in self.transports:
            if transport.source is worker:
                transport.pending.clear()

    def now_ns(self) -> int:
        """Return the time in ns, unique so that no two requests are of the same age."""
        return self._began_ns + int((self.clock.now - self._began_at) * 1e9) + next(self.numbers)

    def submit(
        self, prompt_ids: Sequence[int], max_tokens: int, priority: int = 0, num_stop_ids: int = 0, router: int = 0
    ) -> None:
        """
        Args:
            num_stop_ids: number of token ids that end an output.
            router: index among the living routers; if none lives, the client looks for one.
        """
        client = SimClient(self, prompt_ids, max_tokens, priority, num_stop_ids)
        self.clients.append(client)
        self._unfinished.append(client)
        living = [r for r in self.routers.values() if r.alive]
        if living:
            client.send(living[router % len(living)])
            client.read()

    def read_clients(self) -> None:
        for client in self._served_clients():
            client.read()

    def _served_clients(self) -> list[SimClient]:
        """Return the unfinished clients without scanning the finished ones again."""
        self._unfinished = [client for client in self._unfinished if not client.ended]
        return self._unfinished

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for router in self.routers.values():
            if router.runs:
                router.hear_heartbeats()
                router.check_deadlines()
        self.tell_counts()
        for worker in self.workers.values():
            if worker.runs:
                worker.look_at_time()
                for stream in list(worker.streams.values()):
                    waits = not stream.is_welcomed and not stream.router.runs
                    if waits and self.clock.now - stream.opened_at > WELCOME_TIMEOUT_S:
                        stream.end_at_worker()

    def start_worker(self, worker_id: str, role: str) -> None:
        self.workers[worker_id] = SimWorker(self, worker_id, role, self.num_pages)

    def kill(self, worker: SimWorker) -> None:
        """Kill a worker with SIGKILL; its copies may still land until its exit is observed."""
        worker.alive = False
        del self.workers[worker.worker_id]
        self.dead.append(worker)
        for stream in worker.streams.values():
            stream.worker_dies(is_lost=bool(next(self.numbers) % 2))
        worker.streams.clear()
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

    def kill_router(self, router: SimRouter) -> None:
        router.die()
        for stream in self.streams:
            if stream.router is router:
                stream.router_dies(is_lost=bool(next(self.numbers) % 2))

    def revive_router(self, router: SimRouter) -> None:
        if router.alive:
            router.go_on()
        else:
            self.past_routers.append(router)
            self.routers[router.address] = self._new_router(router.address)

    def _answers(self, address: str) -> bool:
        return self.routers[address].alive

    def _next_router(self, router: SimRouter | None) -> SimRouter | None:
        """Return the client's next router: the others first, in turn."""
        routers = list(self.routers.values())
        start = 0 if router is None else list(self.routers).index(router.address) + 1
        return next((r for r in (*routers[start:], *routers[:start]) if r.alive), None)

    def drain(self) -> None:
        """Stop all faults and check that everything comes to rest with every client served."""
        for worker in list(self.dead):
            self.revive(worker)
        for worker in self.workers.values():
            worker.paused = False
        for router in list(self.routers.values()):
            self.revive_router(router)
        self.plan_workers(set())
        self._settle()
        self.advance(KEEP_S + 1.0)
        self._settle()

    def _settle(self, max_rounds: int = 3000) -> None:
        for round_number in range(max_rounds):
            self.go_on()
            if round_number % 50 == 49:
                self.advance(0.5)
            if not self._unrest():
                return
        raise AssertionError(f"no progress: {self._unrest()}")

    def _unrest(self) -> str:
        """Describe the first unfinished work, or return ""."""
        if lost := self._served_clients():
            waiting = [(client.router.address if client.router else "", len(client.tokens)) for client in lost]
            return f"clients at these routers with so many tokens wait: {waiting}"
        if any(t.pending for t in self.transports):
            return "copies"
        if any(link.queue_to(end) for link in self.links.values() for end in (link.sender, link.receiver) if end.alive):
            return "messages on links"
        if any(s.to_worker or s.to_router for s in self.streams) or any(r.departed for r in self.routers.values()):
            return "messages of routers"
        if not self._all_are_linked():
            return "workers without links"
        for worker in self.workers.values():
            stats = worker.scheduler.stats()
            busy = (stats.num_locked_pages, stats.num_leased_pages, stats.num_running, stats.num_queued)
            if worker.inbox or worker.engine.num_launched or any(busy):
                return f"{worker.incarnation} has {busy} pages locked, leased, requests running, queued"
        return ""

    def _all_are_linked(self) -> bool:
        return all(r.router.workers.num_pairs == self._num_pairs for r in self.routers.values())

    def check_end(self) -> None:
        """Check that every client was served or failed for an accepted reason."""
        lives = {router.router.incarnation for router in self.routers.values()}
        for worker in self.workers.values():
            worker.check()
            # A worker remembers an announced attempt for a while after its request has ended without a lease.
            left = [key for key in worker.attempts() if router_of(key[0]) not in lives]
            assert not left, f"{worker.incarnation} still has {left}, of routers that are gone"
        for client in self.clients:
            if client.failure:
                # Accepted: no worker came back within a minute; three of its workers died with little progress between;
                # or routers failed one after the other.
                assert any(known in client.failure for known in ACCEPTED_FAILURES), client.failure
        # Short outputs may match several requests.
        seeds = [seed for client in self.clients if client.tokens and len(client.seeds) == 1 for seed in client.seeds]
        assert len(seeds) == len(set(seeds)), "two clients have one request's tokens"
        self._check_links()
        self.tell_counts()
        for router in self.routers.values():
            assert router.router.num_requests == 0
            assert not router.policy.open_requests
            for known in router.router.workers:
                load = (known.num_assigned, known.num_pending_tokens, known.num_starting, known.num_suspects)
                assert load == (0, 0, 0, 0), f"{router.address} counts {load} for {known.worker_id}"
                if router.policy.wants_prefixes:
                    cached = cached_identities(self.workers[known.worker_id].cache)
                    assert known.prefixes.identities == cached, f"{router.address} errs about {known.worker_id}'s cache"
        for router in (*self.routers.values(), *self.past_routers):
            assert not router.policy.violations

    def _check_links(self) -> None:
        """Check that links lead from every sending worker to all others that receive."""
        receivers = {w.incarnation for w in self.workers.values() if w.role != "prefill"}
        for worker in self.workers.values():
            if worker.role != "decode":
                assert {peer.incarnation for peer in worker.peers} == receivers
                links = [link for link in self.links.values() if link.sender is worker and link.sender_open]
                assert sorted(link.receiver.incarnation for link in links) == sorted(receivers - {worker.incarnation})

    def check_undisturbed(self) -> None:
        """Check that, when only routers failed, attempts failed only for lack of pages."""
        for router in (*self.routers.values(), *self.past_routers):
            accepted = {"given_back", "deferred", "moved"}
            if router.was_stopped:
                # A worker not yet welcomed may briefly have several streams to this router.
                accepted.add("worker_lost")
            if self.num_forgotten_links:
                # After a time without routers, the first one may hear of a link that is just closing.
                accepted.add("prefill_failed")
            silent = [reason for reason in router.policy.losses if "heartbeat" in reason]
            assert not silent, f"workers were not silent: {silent}"
            assert router.policy.failures.keys() <= accepted, f"attempts have failed: {router.policy.failures}"
