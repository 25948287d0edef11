"""A decode worker's promises of pages: who asked, who was granted what, and how each promise ends."""

from collections.abc import Callable
from dataclasses import dataclass, field

from decode_worker.admissions import Admissions
from decode_worker.config import DecodeConfig
from engine.kvcache.base import Completion
from engine.kvcache.cache_manager import CacheManager, PageHandle
from kvtransfer.events import FromLink, LinkClosed, ReceiverLinkOpened
from kvtransfer.link import Quiet, ReceiverLink
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
from worker.base import Outbox
from worker.events import Event

# How often a waiting lease request may be overtaken by later ones that fit.
MAX_OVERTAKEN = 8
# How soon to look again for receives that have completed.
POLL_S = 0.001

StartCommitted = Callable[[Admit, PageHandle, Committed, int], None]


@dataclass(eq=False, slots=True)
class _Waiting:
    """A lease request that cannot be answered with pages yet: no room, or its Admit is still on its way."""

    request: LeaseRequest
    link: ReceiverLink
    deadline: float
    deferred: bool = False
    num_overtaken: int = 0


@dataclass(eq=False, slots=True)
class _Lease:
    """Granted pages that a prefill worker writes.

    Attributes:
        abandoned: the request ended here; the pages wait for the settlement, and for nothing else.
        receives: two-sided transports: what must complete before the pages hold what was committed.
        committed: the settlement, while `receives` are under way.
    """

    lease_id: str
    admit: Admit
    handle: PageHandle
    link: ReceiverLink
    deadline: float
    granted_ns: int
    abandoned: bool = False
    revoked: bool = False
    receives: list[Completion] = field(default_factory=list)
    committed: Committed | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.admit.request_id, self.admit.attempt


class LeaseBook:
    """Admitted requests, waiting lease requests and granted leases of one decode worker.

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
        self._links: dict[str, ReceiverLink] = {}  # by epoch
        # Epochs whose end has been asked for and not come yet.
        self._ending: dict[str, None] = {}
        # Epochs that have ended while their sender may still write.
        self._unquiet: list[ReceiverLink] = []
        self._admissions = Admissions(clock)
        self._waiting: list[_Waiting] = []
        self._leases: dict[str, _Lease] = {}
        # Settled by Committed, pages still arriving.
        self._arriving: list[_Lease] = []
        self.num_expired = 0
        self.prefix_cached_tokens = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def admit(self, admit: Admit) -> None:
        self._admissions.add(admit)
        self._cache.touch([*admit.prompt_ids, *admit.output_ids], admit.cache_namespace)

    def take_admitted(self, request_id: str, attempt: int) -> Admit | None:
        return self._admissions.take((request_id, attempt))

    def receive(self, event: Event) -> None:
        if isinstance(event, ReceiverLinkOpened):
            self._open(event)
        elif isinstance(event, LinkClosed):
            self._close(event)
        elif isinstance(event, FromLink) and event.epoch in self._links:
            try:
                self._receive_message(self._links[event.epoch], event)
            except ValueError as error:
                # What one sender gets wrong is not for the others to pay for.
                self._outbox.close_link(event.epoch, str(error))

    def abort(self, request_id: str, attempt: int) -> None:
        """Ends an attempt: pages of a granted lease come back when the sender settles it, not before."""
        key = request_id, attempt
        self._admissions.end(key)
        for lease in self._leases.values():
            if lease.key == key:
                self._abandon(lease)
        for lease in self._arriving:
            lease.abandoned = lease.abandoned or lease.key == key

    def abort_all(self) -> None:
        for request_id, attempt in self._admissions.attempts():
            self.abort(request_id, attempt)
        for lease in self._leases.values():
            self._abandon(lease)
        for lease in self._arriving:
            lease.abandoned = True

    def remember_ended(self, request_id: str, attempt: int) -> None:
        self._admissions.end((request_id, attempt))

    def poll(self, num_reserved: int) -> None:
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
            self.abort(*key)
            self._outbox.to_router(LeaseLost(*key))
        for lease in self._leases.values():
            if now >= lease.deadline and not lease.revoked:
                # Expiry frees nothing: the sender is asked, and its answer settles the lease.
                self.num_expired += 1
                self._abandon(lease)
                self._outbox.to_router(LeaseLost(*lease.key))

    def next_deadline(self) -> float | None:
        if self._arriving:
            return self._clock() + POLL_S
        deadlines = self._admissions.deadlines()
        deadlines += [w.deadline for w in self._waiting if self._is_parked(w)]
        deadlines += [lease.deadline for lease in self._leases.values() if not lease.revoked]
        return min(deadlines, default=None)

    def _open(self, event: ReceiverLinkOpened) -> None:
        hello = event.hello
        for link in [*self._unquiet, *self._links.values()]:
            # The same sender opens an epoch only after the copies of the one before have completed, though the end of
            # that one may not have been noticed here yet.
            if link.sender_id == hello.sender_id and link.sender_incarnation == hello.sender_incarnation:
                link.quiet.mark()
        epoch = event.epoch

        def send(message: ReceiverMessage) -> None:
            self._outbox.to_link(epoch, message)

        quiet = Quiet(event.sender_is_gone)
        self._links[epoch] = ReceiverLink(
            hello.sender_id, hello.sender_incarnation, epoch, event.transport, quiet, send
        )

    def _close(self, event: LinkClosed) -> None:
        link = self._links.pop(event.epoch, None)
        self._ending.pop(event.epoch, None)
        event.when_quiet()
        if link is None:
            return
        self._forget_waiting([w for w in self._waiting if w.link is link])
        # The stream is broken, not quiet: the sender may be writing still.
        quiet = link.close()
        for lease in [*self._leases.values(), *self._arriving]:
            if lease.link is not link:
                continue
            self._leases.pop(lease.lease_id, None)
            self._cache.release_pages(lease.handle, after=[quiet])
            if not lease.abandoned:
                self._outbox.to_router(LeaseLost(*lease.key))
        self._arriving = [lease for lease in self._arriving if lease.link is not link]
        self._unquiet = [u for u in [*self._unquiet, link] if not u.is_quiet()]

    def _receive_message(self, link: ReceiverLink, event: FromLink) -> None:
        message = event.message
        if isinstance(message, LeaseRequest):
            if message.lease_id in self._leases or any(w.request.lease_id == message.lease_id for w in self._waiting):
                raise ValueError(f"lease {message.lease_id} is asked for twice")
            self._waiting.append(_Waiting(message, link, self._clock() + self._config.admit_grace_s))
        elif isinstance(message, Pushing | Renewed):
            lease = self._leases.get(message.lease_id)
            if lease is not None:
                lease.deadline = self._clock() + self._config.lease_duration_s
            if isinstance(message, Pushing):
                link.expect(message)
        elif isinstance(message, Committed | Released):
            self._settle(link, message)

    def _settle(self, link: ReceiverLink, message: Committed | Released) -> None:
        """The one place where a granted lease ends while its link lives."""
        receives = link.settle(message)
        if receives is None:
            # Released a request that was still waiting.
            gone = [w for w in self._waiting if w.request.lease_id == message.lease_id]
            self._forget_waiting(gone)
            if isinstance(message, Released) and not message.reported:
                for waiting in gone:
                    self._outbox.to_router(LeaseLost(waiting.request.request_id, waiting.request.attempt))
            return
        lease = self._leases.pop(message.lease_id)
        lease.receives = receives
        if isinstance(message, Committed) and not lease.abandoned and self._is_whole(lease, message):
            lease.committed = message
            self._arriving.append(lease)
            return
        self._cache.release_pages(lease.handle, after=receives)
        is_reported = isinstance(message, Released) and message.reported
        if not lease.abandoned and not is_reported:
            self._outbox.to_router(LeaseLost(*lease.key))

    def _forget_waiting(self, gone: list[_Waiting]) -> None:
        """Their sender does not want these leases any more; nobody else will ask for them on this attempt."""
        self._waiting = [w for w in self._waiting if w not in gone]
        for waiting in gone:
            self._admissions.take((waiting.request.request_id, waiting.request.attempt))

    def _is_whole(self, lease: _Lease, message: Committed) -> bool:
        """Whether as much was committed as was leased."""
        num_tokens = len(lease.admit.prompt_ids) + len(lease.admit.output_ids)
        num_pages = self._cache.num_pages_for(num_tokens) - lease.handle.num_shared
        return (message.num_tokens, message.num_pages) == (num_tokens, num_pages)

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

    def _is_parked(self, waiting: _Waiting) -> bool:
        return (waiting.request.request_id, waiting.request.attempt) not in self._admissions

    def _answer(self, now: float, num_reserved: int) -> list[_Waiting]:
        """Grants what fits, in order; returns who goes on waiting. A request that fits may overtake one that does not,
        but each of those only MAX_OVERTAKEN times: then all wait until it has its pages."""
        remaining: list[_Waiting] = []
        # Those that found no room in this round, in order.
        overtaken: list[_Waiting] = []
        for waiting in self._waiting:
            request, link = waiting.request, waiting.link
            key = request.request_id, request.attempt
            if self._admissions.has_ended(key):
                link.refuse(request.lease_id, "gone")
            elif key not in self._admissions:
                if now >= waiting.deadline:
                    link.refuse(request.lease_id, "unknown")
                else:
                    remaining.append(waiting)
            elif self._cache.num_pages_for(request.num_tokens + 1) > self._cache.num_pages:
                link.refuse(request.lease_id, "too_large")
            elif all(o.num_overtaken < MAX_OVERTAKEN for o in overtaken) and self._grant(waiting, num_reserved):
                for other in overtaken:
                    other.num_overtaken += 1
            else:
                overtaken.append(waiting)
                if not waiting.deferred:
                    waiting.deferred = True
                    link.defer(request.lease_id)
                remaining.append(waiting)
        return remaining

    def _grant(self, waiting: _Waiting, num_reserved: int) -> bool:
        request, link = waiting.request, waiting.link
        key = request.request_id, request.attempt
        admit = self._admissions[key]
        token_ids = [*admit.prompt_ids, *admit.output_ids]
        if len(token_ids) != request.num_tokens:
            link.refuse(request.lease_id, "unknown")
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
        self._admissions.take(key)
        self.prefix_cached_tokens += min(handle.cached_len, len(admit.prompt_ids))
        deadline = self._clock() + self._config.lease_duration_s
        self._leases[request.lease_id] = _Lease(request.lease_id, admit, handle, link, deadline, granted_ns=now_ns())
        link.grant(request.lease_id, handle.cached_len, handle.page_ids[handle.num_shared :])
        return True

    def _abandon(self, lease: _Lease) -> None:
        lease.abandoned = True
        if not lease.revoked:
            lease.revoked = True
            lease.link.revoke(lease.lease_id)
