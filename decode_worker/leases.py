"""A decode worker's promises of pages: who asked, who was granted what, and how each promise ends."""

from collections.abc import Callable

from decode_worker.admissions import Admissions
from decode_worker.config import DecodeConfig
from decode_worker.lease_records import GrantedLease, WaitingLease
from engine.kvcache.cache_manager import CacheManager, PageHandle
from kvtransfer.events import FromLink, ReceiverLinkClosed, ReceiverLinkOpened
from kvtransfer.receiver_link import ReceiverLink
from tandem.lifecycle import now_ns
from tandem.messages import (
    Admit,
    Committed,
    LeaseLost,
    LeaseRequest,
    Pushing,
    ReceiverMessage,
    Released,
    Renewed,
)
from tandem.request_ids import router_of
from worker.base import Outbox
from worker.events import Event

# A waiting lease request may be overtaken so often by later ones that fit.
MAX_OVERTAKEN = 8
# Receives that have completed are looked for again so soon.
POLL_S = 0.001

StartCommitted = Callable[[Admit, PageHandle, Committed, int], None]


class LeaseBook:
    """Admitted requests, waiting lease requests and granted leases of one decode worker. Each granted lease is settled
    by exactly one Committed or Released, or by the end of its epoch.

    Attributes:
        num_expired: granted leases that no prefill worker filled in time.
        prefix_cached_tokens: tokens of prompts that were here when their leases were granted.
    """

    def __init__(
        self,
        cache: CacheManager,
        outbox: Outbox,
        config: DecodeConfig,
        clock: Callable[[], float],
        start: StartCommitted,
    ) -> None:
        """Args: start: takes over a request whose pages have all arrived, with its handle."""
        self._cache = cache
        self._outbox = outbox
        self._config = config
        self._clock = clock
        self._start = start
        # Each open epoch has one.
        self._links: dict[str, ReceiverLink] = {}
        # The end of these epochs has been asked for and not come yet.
        self._ending: dict[str, None] = {}
        # These epochs have ended while their sender may still write.
        self._unquiet: list[ReceiverLink] = []
        self._admissions = Admissions(clock)
        self._waiting: list[WaitingLease] = []
        self._granted: dict[str, GrantedLease] = {}
        # These are settled by Committed, and their pages may still be arriving.
        self._arriving: list[GrantedLease] = []
        self.num_expired = 0
        self.prefix_cached_tokens = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def admit_request(self, admit: Admit) -> None:
        """Remembers a request that the router has announced, and keeps what is cached of it."""
        self._admissions.remember_admitted(admit)
        self._cache.touch([*admit.prompt_ids, *admit.output_ids], admit.cache_namespace)

    def take_admitted(self, request_id: str, attempt: int) -> Admit | None:
        """Hands out a request that needs no lease."""
        return self._admissions.take_admitted((request_id, attempt))

    def receive(self, event: Event) -> None:
        """Takes whatever the scheduler is told; most of it concerns no lease."""
        if isinstance(event, ReceiverLinkOpened):
            self._open(event)
        elif isinstance(event, ReceiverLinkClosed):
            self._close(event)
        elif isinstance(event, FromLink) and event.epoch in self._links:
            try:
                self._receive_message(self._links[event.epoch], event)
            except ValueError as error:
                # What one sender gets wrong is not for the others to pay for.
                self._outbox.close_link(event.epoch, str(error))

    def abort_attempt(self, request_id: str, attempt: int) -> None:
        """Ends an attempt: pages of a granted lease come back when the sender settles it, not before."""
        key = request_id, attempt
        self._admissions.mark_ended(key)
        for lease in self._granted.values():
            if lease.key == key:
                self._abandon(lease)
        for lease in self._arriving:
            lease.abandoned = lease.abandoned or lease.key == key

    def abort_all_attempts_of(self, router: str) -> None:
        """Ends the attempts of a router that is gone."""
        for request_id, attempt in self._admissions.attempts():
            if router_of(request_id) == router:
                self.abort_attempt(request_id, attempt)
        for lease in self._granted.values():
            if router_of(lease.admit.request_id) == router:
                self._abandon(lease)
        for lease in self._arriving:
            if router_of(lease.admit.request_id) == router:
                lease.abandoned = True

    def mark_ended(self, request_id: str, attempt: int) -> None:
        """An attempt that has no lease any more is over: whatever still comes for it is refused."""
        self._admissions.mark_ended((request_id, attempt))

    def answer_requests(self, num_reserved: int) -> None:
        """Answers waiting requests in order, and lets deadlines pass.

        Args:
            num_reserved: pages that grants must leave for running requests to grow into.
        """
        now = self._clock()
        for link in self._links.values():
            if link.failure and link.epoch not in self._ending:
                self._ending[link.epoch] = None
                self._outbox.close_link(link.epoch, link.failure)
        self._waiting = self._answer(now, num_reserved)
        for key in self._admissions.expired():
            self.abort_attempt(*key)
            self._outbox.to_router(LeaseLost(*key))
        for lease in self._granted.values():
            if now >= lease.deadline and not lease.revoked:
                # Expiry frees nothing: the sender is asked, and its answer settles the lease.
                self.num_expired += 1
                self._abandon(lease)
                self._outbox.to_router(LeaseLost(*lease.key))

    def start_arrived(self) -> None:
        """Hands over the requests whose pages are all here, in the order in which they were committed."""
        arriving, self._arriving = self._arriving, []
        for lease in arriving:
            if not all(receive.done() for receive in lease.receives):
                self._arriving.append(lease)
            elif lease.abandoned:
                self._cache.release_pages(lease.handle)
            else:
                message = lease.committed
                assert message is not None
                self._cache.commit_lease(lease.handle)
                self._start(lease.admit, lease.handle, message, lease.granted_ns)

    def next_deadline(self) -> float | None:
        if self._arriving:
            return self._clock() + POLL_S
        deadlines = self._admissions.deadlines()
        deadlines += [w.deadline for w in self._waiting if self._is_parked(w)]
        deadlines += [lease.deadline for lease in self._granted.values() if not lease.revoked]
        return min(deadlines, default=None)

    def _open(self, event: ReceiverLinkOpened) -> None:
        hello = event.hello
        for link in [*self._unquiet, *self._links.values()]:
            # The same sender opens an epoch only after the copies of the one before have completed, though the end of
            # that one may not have been noticed here yet.
            if link.sender_id == hello.sender_id and link.sender_incarnation == hello.sender_incarnation:
                link.mark_quiet()
        epoch = event.epoch

        def send(message: ReceiverMessage) -> None:
            self._outbox.to_link(epoch, message)

        self._links[epoch] = ReceiverLink(
            hello.sender_id, hello.sender_incarnation, epoch, event.transport, event.sender_is_gone, send
        )

    def _close(self, event: ReceiverLinkClosed) -> None:
        link = self._links.pop(event.epoch)
        self._ending.pop(event.epoch, None)
        self._forget_waiting([w for w in self._waiting if w.link is link])
        # The stream is broken, not quiet: the sender may be writing still.
        quiet = link.end_epoch()
        for lease in [*self._granted.values(), *self._arriving]:
            if lease.link is not link:
                continue
            self._granted.pop(lease.lease_id, None)
            self._cache.release_pages(lease.handle, after=[quiet])
            if not lease.abandoned:
                self._outbox.to_router(LeaseLost(*lease.key))
        self._arriving = [lease for lease in self._arriving if lease.link is not link]
        self._unquiet = [u for u in [*self._unquiet, link] if not u.is_quiet()]

    def _receive_message(self, link: ReceiverLink, event: FromLink) -> None:
        message = event.message
        if isinstance(message, LeaseRequest):
            if message.lease_id in self._granted or any(w.lease_id == message.lease_id for w in self._waiting):
                raise ValueError(f"lease {message.lease_id} is asked for twice")
            self._waiting.append(WaitingLease(message, link, self._clock() + self._config.admit_grace_s))
        elif isinstance(message, Pushing | Renewed):
            lease = self._find_granted(link, message.lease_id)
            if lease is not None:
                lease.deadline = self._clock() + self._config.lease_duration_s
            if isinstance(message, Pushing):
                receive = link.expect_push(message, lease.destinations(message) if lease else None)
                if lease is not None:
                    lease.receives.append(receive)
        elif isinstance(message, Committed | Released):
            self._settle(link, message)

    def _find_granted(self, link: ReceiverLink, lease_id: str) -> GrantedLease | None:
        """A granted lease that is not settled, if its sender is the one who speaks of it."""
        lease = self._granted.get(lease_id)
        return lease if lease is not None and lease.link is link else None

    def _settle(self, link: ReceiverLink, message: Committed | Released) -> None:
        """The one place where a granted lease ends while its link lives."""
        lease = self._find_granted(link, message.lease_id)
        if lease is None:
            # It releases a request that was still waiting, or something that has ended.
            gone = [w for w in self._waiting if w.lease_id == message.lease_id]
            self._forget_waiting(gone)
            if isinstance(message, Released) and not message.reported:
                for waiting in gone:
                    self._outbox.to_router(LeaseLost(*waiting.key))
            return
        del self._granted[message.lease_id]
        if isinstance(message, Committed) and not lease.abandoned and self._is_whole(lease, message):
            lease.committed = message
            self._arriving.append(lease)
            return
        self._cache.release_pages(lease.handle, after=lease.receives)
        is_reported = isinstance(message, Released) and message.reported
        if not lease.abandoned and not is_reported:
            self._outbox.to_router(LeaseLost(*lease.key))

    def _forget_waiting(self, gone: list[WaitingLease]) -> None:
        """Their sender does not want these leases any more; nobody else will ask for them on this attempt."""
        self._waiting = [w for w in self._waiting if w not in gone]
        for waiting in gone:
            self._admissions.take_admitted(waiting.key)

    def _is_whole(self, lease: GrantedLease, message: Committed) -> bool:
        """Whether as much was committed as was leased."""
        num_tokens = len(lease.admit.prompt_ids) + len(lease.admit.output_ids)
        num_pages = self._cache.num_pages_for(num_tokens) - lease.handle.num_shared
        return (message.num_tokens, message.num_pages) == (num_tokens, num_pages)

    def _is_parked(self, waiting: WaitingLease) -> bool:
        """Whether it waits for its Admit, which comes on another stream."""
        return self._admissions.find_admitted(waiting.key) is None

    def _answer(self, now: float, num_reserved: int) -> list[WaitingLease]:
        """Grants what fits, in order; returns who goes on waiting. A request that fits may overtake one that does not,
        but each of those only MAX_OVERTAKEN times: then all wait until it has its pages."""
        remaining: list[WaitingLease] = []
        # These found no pages this time; they stand in order.
        overtaken: list[WaitingLease] = []
        for waiting in self._waiting:
            if self._admissions.has_ended(waiting.key):
                waiting.link.refuse_lease(waiting.lease_id, "gone")
            elif self._is_parked(waiting):
                if now >= waiting.deadline:
                    waiting.link.refuse_lease(waiting.lease_id, "unknown")
                else:
                    remaining.append(waiting)
            elif self._cache.num_pages_for(waiting.request.num_tokens + 1) > self._cache.num_pages:
                waiting.link.refuse_lease(waiting.lease_id, "too_large")
            elif all(o.num_overtaken < MAX_OVERTAKEN for o in overtaken) and self._grant(waiting, num_reserved):
                for other in overtaken:
                    other.num_overtaken += 1
            else:
                overtaken.append(waiting)
                remaining.append(waiting)
        return remaining

    def _grant(self, waiting: WaitingLease, num_reserved: int) -> bool:
        """Answers an admitted request, unless it must wait for pages; returns whether it did."""
        admit = self._admissions.find_admitted(waiting.key)
        assert admit is not None
        token_ids = [*admit.prompt_ids, *admit.output_ids]
        if len(token_ids) != waiting.request.num_tokens:
            waiting.link.refuse_lease(waiting.lease_id, "unknown")
            return True
        # The page of the first decode step is part of the lease.
        handle = self._cache.acquire_pages(
            token_ids,
            len(token_ids) + 1,
            max_cached_len=len(token_ids),
            namespace=admit.cache_namespace,
            priority=admit.priority,
            leased=True,
            num_reserved=num_reserved,
        )
        if handle is None:
            return False
        self._admissions.take_admitted(waiting.key)
        self.prefix_cached_tokens += min(handle.cached_len, len(admit.prompt_ids))
        page_ids = handle.page_ids[handle.num_shared :]
        deadline = self._clock() + self._config.lease_duration_s
        self._granted[waiting.lease_id] = GrantedLease(
            waiting.lease_id, admit, handle, page_ids, waiting.link, deadline, granted_ns=now_ns()
        )
        waiting.link.grant_lease(waiting.lease_id, handle.cached_len, page_ids)
        return True

    def _abandon(self, lease: GrantedLease) -> None:
        lease.abandoned = True
        if not lease.revoked:
            lease.revoked = True
            lease.link.revoke_lease(lease.lease_id)
