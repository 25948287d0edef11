"""Handover over links: requests leases, ships pages as chunks end, commits."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from tandem.engine.kvcache.base import Completion, PageLayout
from tandem.engine.launch_list import LaunchList
from tandem.kvtransfer.events import FromReceiver, SenderLinkClosed, SenderLinkFailed, SenderLinkOpened
from tandem.kvtransfer.sender_link import MAX_PAGES_IN_FLIGHT, SenderLease, SenderLeaseState, SenderLink
from tandem.lifecycle import now_ns
from tandem.messages import Committed, Granted, LinkState, Prefill, Refused, Revoke, SenderMessage, Shipped
from tandem.prefill_worker.base import Handover, HandoverResult
from tandem.prefill_worker.job import PrefillJob
from tandem.recording import HANDOVERS, Recorder, copies_to
from tandem.worker.base import Outbox
from tandem.worker.events import Event

# Delay before a lease refused for a full queue is requested again, in seconds.
ASK_AGAIN_S = 0.5
LINK_LOST = "the link to the decode worker was lost"


class LinkHandover(Handover):
    def __init__(
        self,
        layout: PageLayout,
        launches: LaunchList,
        outbox: Outbox,
        clock: Callable[[], float],
        max_pages_in_flight: int = MAX_PAGES_IN_FLIGHT,
        recorder: Recorder | None = None,
    ) -> None:
        """
        Args:
            launches: forward passes that may still write the pages.
            max_pages_in_flight: limit of each link.
        """
        self._layout = layout
        self._launches = launches
        self._outbox = outbox
        self._clock = clock
        self._max_pages_in_flight = max_pages_in_flight
        self._recorder = recorder or Recorder()
        # By epoch: a peer's new link may open before its old one's end is noticed.
        self._links: dict[str, SenderLink] = {}
        # Epochs whose end was requested and has not come.
        self._ending: dict[str, None] = {}
        # Leases of jobs in handover. A job refused for a full queue is in _asking_again, with the link and the time.
        self._leases: dict[PrefillJob, SenderLease] = {}
        # Jobs with pages held back by the limit of pages in flight.
        self._held_back: dict[PrefillJob, None] = {}
        self._asking_again: dict[PrefillJob, tuple[SenderLink, float]] = {}
        self._results: list[HandoverResult] = []
        # Copies of ended epochs, and the functions to call when they complete.
        self._closing: list[tuple[Completion, Callable[[], None]]] = []
        # Totals by (receiver, transport), without the copy time of open epochs.
        self._shipped: dict[tuple[str, str], Shipped] = {}
        # Totals with that time; None while it grows, and after a change.
        self._shipped_now: tuple[Shipped, ...] | None = None

    def continues_here(self, request: Prefill) -> bool:
        return False

    @property
    def shipped(self) -> tuple[Shipped, ...]:
        # Every turn of the engine thread asks, and a large cluster has dozens of links.
        is_copying = any(link.is_copying for link in self._links.values())
        if self._shipped_now is None or is_copying:
            shipped = self._shipped_by_now()
            self._shipped_now = None if is_copying else shipped
            return shipped
        return self._shipped_now

    def _shipped_by_now(self) -> tuple[Shipped, ...]:
        copying_ns = Counter[tuple[str, str]]()
        for link in self._links.values():
            copying_ns[link.peer_id, link.transport_name] += link.copying_ns
        return tuple(replace(s, copying_ns=s.copying_ns + copying_ns[key]) for key, s in self._shipped.items())

    @property
    def is_copying(self) -> bool:
        return bool(self._closing) or any(link.is_copying for link in self._links.values())

    def refusal(self, request: Prefill) -> str:
        if self._link_to(request.decode_worker_id) is not None:
            return ""
        return f"no link to decode worker {request.decode_worker_id}"

    def begin(self, job: PrefillJob) -> None:
        link = self._link_to(job.request.decode_worker_id)
        assert link is not None
        self._ask(job, link)

    def advance(self, job: PrefillJob) -> None:
        # If the link was lost during the chunk, take_results reports it.
        lease = self._leases.get(job)
        if lease is not None:
            self._ship(job, lease)
            if job.first_token is None:
                lease.link.renew_lease(lease)
            elif job.finish_reason and lease.state is SenderLeaseState.REQUESTED:
                # The first token ended the request: do not wait for a grant.
                lease.link.release_lease(lease)

    def cancel(self, job: PrefillJob, *, reported: bool) -> None:
        self._asking_again.pop(job, None)
        self._held_back.pop(job, None)
        lease = self._leases.pop(job, None)
        if lease is not None:
            lease.link.release_lease(lease, reported=reported)

    def receive(self, event: Event) -> None:
        if isinstance(event, SenderLinkOpened):
            self._open(event)
        elif isinstance(event, SenderLinkFailed):
            self._outbox.to_router(LinkState(event.peer_id, event.peer_incarnation, up=False, reason=event.reason))
        elif isinstance(event, FromReceiver):
            self._receive_message(event)
        elif isinstance(event, SenderLinkClosed):
            self._close(event)

    def go_on(self) -> None:
        for link in self._links.values():
            link.send_settlements()
        for job in list(self._held_back):
            self._ship(job, self._leases[job])

    def take_results(self) -> list[HandoverResult]:
        self.go_on()
        for link in self._links.values():
            if link.failure and link.epoch not in self._ending:
                self._ending[link.epoch] = None
                self._outbox.close_link(link.epoch, link.failure)
        self._closing = [(copies, tell) for copies, tell in self._closing if not _tell_if_done(copies, tell)]
        for job, lease in list(self._leases.items()):
            if lease.settled:
                self._finish(job, lease)
        self._ask_again()
        results, self._results = self._results, []
        return results

    def _ask(self, job: PrefillJob, link: SenderLink) -> None:
        request = job.request
        self._leases[job] = link.request_lease(request.request_id, request.attempt, len(job.sequence.token_ids))

    def _ask_again(self) -> None:
        now = self._clock()
        for job, (link, due) in list(self._asking_again.items()):
            if job.finish_reason:
                # The first token ended the request.
                del self._asking_again[job]
                self._results.append(HandoverResult(job))
            elif link.epoch not in self._links:
                del self._asking_again[job]
                self._results.append(HandoverResult(job, LINK_LOST))
            elif now >= due:
                del self._asking_again[job]
                self._ask(job, link)

    def _open(self, event: SenderLinkOpened) -> None:
        epoch, name = event.epoch, event.transport_name

        def send(message: SenderMessage) -> None:
            self._outbox.to_link(epoch, message)

        link = self._links[epoch] = SenderLink(
            event.peer_id, event.peer_incarnation, epoch, name, event.transport, send, self._max_pages_in_flight
        )
        self._shipped.setdefault((event.peer_id, name), Shipped(name, 0, 0, event.peer_id))
        self._shipped_now = None
        self._outbox.to_router(LinkState(link.peer_id, link.peer_incarnation, up=True))

    def _link_to(self, peer_id: str) -> SenderLink | None:
        return next((link for link in reversed(self._links.values()) if link.peer_id == peer_id), None)

    def _receive_message(self, event: FromReceiver) -> None:
        link = self._links.get(event.epoch)
        message = event.message
        if link is None:
            return
        if not isinstance(message, Granted | Refused | Revoke):
            self._outbox.close_link(event.epoch, f"unexpected {type(message).__name__}")
            return
        link.receive_from_peer(message)
        for job, lease in self._leases.items():
            if lease.lease_id == message.lease_id:
                if lease.revoked:
                    link.release_lease(lease)
                elif lease.state is SenderLeaseState.GRANTED:
                    self._recorder.add(HANDOVERS, "lease", job.started_ns, (job.request.request_id,))
                    self._ship(job, lease)
                return

    def _close(self, event: SenderLinkClosed) -> None:
        link = self._links.pop(event.epoch, None)
        if link is None:
            # None of its copies is in flight.
            event.when_quiet()
            return
        self._ending.pop(event.epoch, None)
        self._outbox.to_router(LinkState(link.peer_id, link.peer_incarnation, up=False, reason=event.reason))
        key = link.peer_id, link.transport_name
        before = self._shipped[key]
        self._shipped[key] = replace(before, copying_ns=before.copying_ns + link.copying_ns)
        self._shipped_now = None
        copies = link.end_epoch()
        if not _tell_if_done(copies, event.when_quiet):
            self._closing.append((copies, event.when_quiet))

    def _ship(self, job: PrefillJob, lease: SenderLease) -> None:
        """Pushes computed full pages, after the last chunk also the partial page; then commits."""
        if lease.state is not SenderLeaseState.GRANTED:
            self._held_back.pop(job, None)
            return
        grant = lease.grant
        assert grant is not None and job.handle is not None
        num_tokens = len(job.sequence.token_ids)
        num_pages = self._layout.num_pages_for(num_tokens)
        first_page, misaligned = divmod(grant.cached_len, self._layout.page_size)
        if misaligned or grant.cached_len > num_tokens or len(grant.page_ids) < num_pages - first_page:
            lease.link.release_lease(lease)
            return
        num_pushed = lease.num_pages_pushed
        start = first_page + num_pushed
        num_allowed = lease.link.num_pages_allowed()
        # The first token follows from logits of all ranks, computed after their KV.
        num_ready = num_pages
        if job.first_token is None:
            # All these pages are launched, some by other jobs. One page more than may be pushed tells whether pages are
            # held back; checking thousands is too slow.
            num_launched = job.sequence.cached_len // self._layout.page_size
            end = min(num_launched, start + num_allowed + 1)
            num_ready = start + self._launches.num_ready(job.handle.page_ids[start:end])
        num_to_push = min(max(0, num_ready - start), num_allowed)
        if num_to_push < num_ready - start:
            self._held_back[job] = None
        else:
            self._held_back.pop(job, None)
        if num_to_push:
            pushing_ns = now_ns()
            job.ship_started_ns = job.ship_started_ns or pushing_ns
            lease.link.push_pages(
                lease,
                job.handle.page_ids[start : start + num_to_push],
                grant.page_ids[num_pushed : num_pushed + num_to_push],
            )
            if self._recorder.is_on:
                self._recorder.started(
                    copies_to(lease.link.peer_id),
                    "copy",
                    pushing_ns,
                    lease.copies[-1].done,
                    job.request.request_id,
                    num_pages=num_to_push,
                    num_bytes=num_to_push * self._layout.page_bytes,
                )
            self._count(lease.link, num_to_push)
            job.copies = lease.copies
        if job.first_token is not None and start + num_to_push >= num_pages:
            committed = Committed(
                lease.lease_id,
                job.first_token,
                num_pages=lease.num_pages_pushed,
                num_tokens=num_tokens,
                finish_reason=job.finish_reason,
                ship_started_ns=job.ship_started_ns,
                logprobs=job.logprobs,
                prefill_cached_len=job.handle.cached_len,
                prefill_loaded=job.loaded,
            )
            lease.link.commit_pages(lease, committed)

    def _count(self, link: SenderLink, num_pages: int) -> None:
        key = link.peer_id, link.transport_name
        before = self._shipped[key]
        num_bytes = num_pages * self._layout.page_bytes
        self._shipped_now = None
        self._shipped[key] = replace(
            before, num_pages=before.num_pages + num_pages, num_bytes=before.num_bytes + num_bytes
        )

    def _finish(self, job: PrefillJob, lease: SenderLease) -> None:
        del self._leases[job]
        self._held_back.pop(job, None)
        job.copies = lease.copies
        if lease.refusal == "full" and not job.finish_reason:
            self._asking_again[job] = lease.link, self._clock() + ASK_AGAIN_S
            return
        failure = "" if job.finish_reason else _failure(lease)
        self._results.append(HandoverResult(job, failure, lease.settled_ns, lease.refusal))


def _failure(lease: SenderLease) -> str:
    match lease.state:
        case SenderLeaseState.COMMITTED:
            return ""
        case SenderLeaseState.REFUSED:
            return f"the decode worker refused the lease: {lease.refusal}"
        case SenderLeaseState.LOST:
            return LINK_LOST
        case _:
            return "the lease ended before its pages had arrived"


def _tell_if_done(copies: Completion, tell: Callable[[], None]) -> bool:
    if copies.done():
        tell()
        return True
    return False
