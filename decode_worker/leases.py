"""Leases of a decode worker: grants, expiry and settlement."""

from collections.abc import Callable

from tandem.decode_worker.admissions import Admissions, AttemptKey
from tandem.decode_worker.config import DecodeConfig
from tandem.decode_worker.lease import Lease, LeaseState
from tandem.decode_worker.waiting_leases import WaitingLeases
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.kvtransfer.events import FromSender, ReceiverLinkClosed, ReceiverLinkEvent, ReceiverLinkOpened
from tandem.kvtransfer.receiver_link import ReceiverLink
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
from tandem.recording import HANDOVERS, Recorder
from tandem.request_ids import router_of
from tandem.worker.base import Outbox
from tandem.worker.kept_pages import KeptPages
from tandem.worker.page_tier import NoTier, PageTier
from tandem.worker.prefetches import Prefetches
from tandem.worker.prefix_hits import PrefixHits

# Poll interval for completed receives, in seconds.
POLL_S = 0.001

# Pages granted beyond those that go ahead of a move: for the stream's last tokens and its output meanwhile.
MOVE_ROOM_PAGES = 3

StartCommitted = Callable[[Lease], None]


class LeaseBook:
    """All admitted requests and leases of one decode worker.

    Each grant is settled by exactly one Committed or Released, or by the end of its epoch. Stored pages of a prompt are
    prefetched from its Admit to its grant, which waits for none of them.

    Attributes:
        hits: prompt tokens found cached at the grants.
    """

    def __init__(
        self,
        cache: CacheManager,
        outbox: Outbox,
        config: DecodeConfig,
        clock: Callable[[], float],
        start: StartCommitted,
        recorder: Recorder | None = None,
        *,
        tier: PageTier | None = None,
        prefill_worker_id: str = "",
        lack_of: Callable[[Admit], str] = lambda admit: "",
    ) -> None:
        """
        Args:
            start: takes over a request whose pages have all arrived.
            tier, prefill_worker_id: see DecodeScheduler.
            lack_of: returns the reason for refusing a moving stream that could not go on at once, or "".
        """
        self._cache = cache
        self._outbox = outbox
        self._config = config
        self._clock = clock
        self._start = start
        self._recorder = recorder or Recorder()
        self._links: dict[str, ReceiverLink] = {}
        # Epochs whose end was requested and has not come.
        self._ending: dict[str, None] = {}
        # Ended epochs whose sender may still write.
        self._unquiet: list[ReceiverLink] = []
        self._admissions = Admissions(clock)
        self._waiting = WaitingLeases(clock, config)
        self._granted: dict[str, Lease] = {}
        # Lower bound of all expiries.
        self._first_expiry: float | None = None
        # Settled by Committed; pages may still be arriving.
        self._arriving: list[Lease] = []
        self.num_expired = 0
        self.hits = PrefixHits()
        self._prefetches = Prefetches(tier or NoTier(), "decode")
        self._prefill_worker_id = prefill_worker_id
        self._lack_of = lack_of
        self._num_reserved = 0
        # Pages that went ahead of moving streams.
        self._kept = KeptPages(cache, clock)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def first_waiting_place(self) -> int | None:
        return self._waiting.first_place

    def note_prompts(self, first: int | None, *, has_started: bool) -> None:
        """See WaitingLeases."""
        self._waiting.note_prompts(first, has_started=has_started)

    def admit_request(self, admit: Admit) -> None:
        """Remembers an announced request and refreshes its cached prefix."""
        self._admissions.remember_admitted(admit)
        token_ids = [*admit.prompt_ids, *admit.output_ids]
        self._cache.touch(token_ids, admit.cache_namespace)
        is_here = self._prefill_worker_id and admit.prefill_worker_id == self._prefill_worker_id
        if not (is_here or admit.copy_of):
            key = admit.request_id, admit.attempt
            self._prefetches.begin(key, token_ids, admit.cache_namespace, admit.priority)
        # Last: a grant ends the prefetch.
        waiting = self._waiting.announce(admit)
        if waiting is not None:
            self._enqueue(waiting)

    def take_admitted(self, request_id: str, attempt: int) -> Admit | None:
        self._prefetches.end((request_id, attempt))
        return self._admissions.take_admitted((request_id, attempt))

    def receive(self, event: ReceiverLinkEvent) -> None:
        if isinstance(event, ReceiverLinkOpened):
            self._open(event)
        elif isinstance(event, ReceiverLinkClosed):
            self._close(event)
        elif isinstance(event, FromSender) and event.epoch in self._links:
            try:
                self._receive_message(self._links[event.epoch], event)
            except ValueError as error:
                # One sender's error must not affect the others.
                self._outbox.close_link(event.epoch, str(error))

    def abort_attempt(self, request_id: str, attempt: int) -> None:
        """Ends an attempt. A granted lease's pages return when the sender settles it."""
        key = request_id, attempt
        self._end_before_grant(key)
        for lease in self._granted.values():
            if lease.key == key:
                self._abandon(lease)
        for lease in self._arriving:
            lease.abandoned = lease.abandoned or lease.key == key

    def abort_all_attempts_of(self, router: str) -> None:
        for lease in self._granted.values():
            if router_of(lease.admit.request_id) == router:
                self._abandon(lease)
        for lease in self._arriving:
            if router_of(lease.admit.request_id) == router:
                lease.abandoned = True
        for key in [*self._admissions.attempts(), *self._waiting.attempts()]:
            if router_of(key[0]) == router:
                self._end_before_grant(key)
        self._kept.let_go_all_of(router)

    def mark_ended(self, request_id: str, attempt: int) -> None:
        """Refuses later messages about an attempt without a lease."""
        self._prefetches.end((request_id, attempt))
        self._admissions.mark_ended((request_id, attempt))

    def answer_requests(self, num_reserved: int) -> None:
        """Grants queued leases in order and handles deadlines.

        Args:
            num_reserved: pages left free for running requests to grow into.
        """
        now = self._clock()
        self._num_reserved = num_reserved
        self._kept.let_go_overdue()
        for link in self._links.values():
            if link.failure and link.epoch not in self._ending:
                self._ending[link.epoch] = None
                self._outbox.close_link(link.epoch, link.failure)
        for waiting in self._waiting.take_overdue():
            waiting.link.refuse_lease(waiting.lease_id, "unknown")
        self._waiting.grant_in_order(
            lambda: self._cache.num_available_pages - num_reserved, lambda waiting: self._grant(waiting, num_reserved)
        )
        for key in self._admissions.take_expired():
            self.mark_ended(*key)
            self._outbox.to_router(LeaseLost(*key))
        self._expire(now)

    def look_again(self) -> None:
        """Tries queued leases again: a larger cache may leave fewer pages to grant."""
        self._waiting.look_again()

    def start_arrived(self) -> None:
        """Starts requests whose pages have all arrived, in commit order."""
        arriving, self._arriving = self._arriving, []
        for lease in arriving:
            if not all(receive.done() for receive in lease.receives):
                self._arriving.append(lease)
            elif lease.abandoned:
                self._cache.release_pages(lease.handle)
            else:
                self._recorder.add(HANDOVERS, "commit", lease.committed_ns, (lease.admit.request_id,))
                self._cache.commit_lease(lease.handle)
                if lease.admit.copy_of:
                    self._keep(lease)
                else:
                    self._start(lease)

    def next_deadline(self) -> float | None:
        if self._arriving:
            return self._clock() + POLL_S
        expiry = self._first_expiry if self._granted else None
        deadlines = (
            self._admissions.next_deadline(),
            self._waiting.next_deadline(),
            self._kept.next_deadline(),
            expiry,
        )
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _open(self, event: ReceiverLinkOpened) -> None:
        hello = event.hello
        for link in [*self._unquiet, *self._links.values()]:
            # A sender opens an epoch only after its previous copies have completed, even if that epoch's end is not
            # noticed here.
            if link.sender_id == hello.sender_id and link.sender_incarnation == hello.sender_incarnation:
                link.mark_quiet()
        epoch = event.epoch

        def send(message: ReceiverMessage) -> None:
            self._outbox.to_link(epoch, message)

        self._links[epoch] = ReceiverLink(
            hello.sender_id, hello.sender_incarnation, epoch, event.transport, event.sender_is_gone, send
        )

    def _close(self, event: ReceiverLinkClosed) -> None:
        link = self._links.pop(event.epoch, None)
        if link is None:
            return
        # Committed requests with all pages go on.
        self.start_arrived()
        self._ending.pop(event.epoch, None)
        for waiting in self._waiting.of_link(link):
            self._drop_waiting(waiting)
        # The stream is broken, not quiet: the sender may still write.
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

    def _receive_message(self, link: ReceiverLink, event: FromSender) -> None:
        message = event.message
        if isinstance(message, LeaseRequest):
            self._ask(link, message)
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

    def _ask(self, link: ReceiverLink, request: LeaseRequest) -> None:
        """Refuses, parks or queues a request. Raises ValueError if the lease was requested before."""
        if request.lease_id in self._granted or self._waiting.find(request.lease_id) is not None:
            raise ValueError(f"lease {request.lease_id} was requested twice")
        waiting = Lease(request, link)
        if self._admissions.has_ended(waiting.key):
            link.refuse_lease(request.lease_id, "gone")
        elif self._waiting.of_attempt(waiting.key) is not None:
            link.refuse_lease(request.lease_id, "unknown")
        elif self._admissions.find_admitted(waiting.key) is not None:
            self._enqueue(waiting)
        elif not self._waiting.park(waiting):
            link.refuse_lease(request.lease_id, "full")

    def _enqueue(self, waiting: Lease) -> None:
        """Queues an admitted request's lease, or refuses it for good."""
        admit = self._admissions.find_admitted(waiting.key)
        assert admit is not None
        num_tokens = len(admit.prompt_ids) + len(admit.output_ids)
        refusal = ""
        if num_tokens != waiting.request.num_tokens:
            refusal = "unknown"
        elif self._cache.num_pages_for(num_tokens + 1) > self._cache.max_request_pages:
            refusal = "too_large"
        if refusal:
            if self._waiting.find(waiting.lease_id) is not None:
                self._waiting.remove(waiting)
            waiting.link.refuse_lease(waiting.lease_id, refusal)
            return
        # From here the sender limits the waiting time.
        self._admissions.take_admitted(waiting.key)
        if admit.copy_of or self._kept.let_go(admit.request_id):
            waiting.admit = admit
            self._waiting.withdraw(waiting)
            if admit.copy_of:
                self._answer_copy(waiting)
                return
            # In the same act as the release of the pages that were kept for it.
            if self._grant(waiting, num_reserved=0):
                return
        last = self._waiting.enqueue(waiting, admit)
        if last is not None:
            # Its sender asks again and then gets the same place.
            self._admissions.remember_admitted(last.admit)
            last.link.refuse_lease(last.lease_id, "full")

    def _answer_copy(self, lease: Lease) -> None:
        """Grants pages that go ahead of a move at once, with room for the rest of its stream, or refuses them."""
        if lack := self._lack_of(lease.admit):
            lease.link.refuse_lease(lease.lease_id, lack)
        elif not self._waiting.is_idle or not self._grant(lease, self._num_reserved, MOVE_ROOM_PAGES):
            lease.link.refuse_lease(lease.lease_id, "busy")

    def _keep(self, lease: Lease) -> None:
        """Keeps pages that went ahead of a move, until its stream asks for its lease."""
        self._cache.cache_pages(lease.handle, lease.admit.prompt_ids, lease.num_tokens)
        self._kept.keep(lease.admit.copy_of, lease.handle)
        self.look_again()

    def _drop_waiting(self, waiting: Lease) -> None:
        """Ends a request that its sender no longer wants pages for."""
        self._waiting.remove(waiting)
        self._prefetches.end(waiting.key)

    def _end_before_grant(self, key: AttemptKey) -> None:
        self.mark_ended(*key)
        waiting = self._waiting.end_attempt(key)
        if waiting is not None:
            waiting.link.refuse_lease(waiting.lease_id, "gone")

    def _expire(self, now: float) -> None:
        if self._first_expiry is None or now < self._first_expiry:
            return
        for lease in self._granted.values():
            if now >= lease.deadline and not lease.revoked:
                # Expiry frees nothing: the sender's answer settles the lease.
                self.num_expired += 1
                self._abandon(lease)
                self._outbox.to_router(LeaseLost(*lease.key))
        # Later grants and renewals expire later than these.
        deadlines = (lease.deadline for lease in self._granted.values() if not lease.revoked)
        self._first_expiry = min(deadlines, default=None)

    def _find_granted(self, link: ReceiverLink, lease_id: str) -> Lease | None:
        lease = self._granted.get(lease_id)
        return lease if lease is not None and lease.link is link else None

    def _settle(self, link: ReceiverLink, message: Committed | Released) -> None:
        """Every settlement on a live link goes through this method."""
        lease = self._find_granted(link, message.lease_id)
        if lease is None:
            waiting = self._waiting.find(message.lease_id)
            if waiting is not None and waiting.link is link:
                self._drop_waiting(waiting)
                self._admissions.take_admitted(waiting.key)
                if isinstance(message, Released) and not message.reported:
                    self._outbox.to_router(LeaseLost(*waiting.key))
            return
        del self._granted[message.lease_id]
        if isinstance(message, Committed) and not lease.abandoned and self._is_whole(lease, message):
            lease.state = LeaseState.COMMITTED
            lease.committed = message
            lease.committed_ns = now_ns()
            self._arriving.append(lease)
            return
        self._cache.release_pages(lease.handle, after=lease.receives)
        is_reported = isinstance(message, Released) and message.reported
        if not lease.abandoned and not is_reported:
            self._outbox.to_router(LeaseLost(*lease.key))

    def _is_whole(self, lease: Lease, message: Committed) -> bool:
        num_pages = self._cache.num_pages_for(lease.num_tokens) - lease.handle.num_shared
        return (message.num_tokens, message.num_pages) == (lease.num_tokens, num_pages)

    def _grant(self, lease: Lease, num_reserved: int, num_more: int = 0) -> bool:
        """Grants a lease its pages, if there are enough.

        Args:
            num_more: further pages, which the sender does not fill.
        """
        admit = lease.admit
        token_ids = [*admit.prompt_ids, *admit.output_ids]
        # The lease includes the page of the first decode step.
        handle = self._cache.acquire_pages(
            token_ids,
            len(token_ids) + (num_more * self._cache.page_size or 1),
            max_cached_len=len(token_ids),
            namespace=admit.cache_namespace,
            priority=admit.priority,
            leased=True,
            num_reserved=num_reserved,
        )
        if handle is None:
            return False
        if not admit.copy_of:
            self.hits.add(handle.cached_len, len(admit.prompt_ids), self._prefetches.end(lease.key))
        lease.state = LeaseState.GRANTED
        lease.handle = handle
        lease.deadline = self._clock() + self._config.lease_duration_s
        lease.granted_ns = now_ns()
        if self._first_expiry is None:
            self._first_expiry = lease.deadline
        self._granted[lease.lease_id] = lease
        self._recorder.add(HANDOVERS, "lease wait", lease.asked_ns, (admit.request_id,))
        lease.link.grant_lease(lease.lease_id, handle.cached_len, lease.granted_pages)
        return True

    def _abandon(self, lease: Lease) -> None:
        lease.abandoned = True
        if not lease.revoked:
            lease.revoked = True
            lease.link.revoke_lease(lease.lease_id)
