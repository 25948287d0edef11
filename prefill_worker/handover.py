"""Handing a prefill over to a decode worker: ask for a lease, ship pages as chunks end, commit."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.kvcache.base import Completion, PageLayout
from kvtransfer.events import FromLink, LinkClosed, SenderLinkOpened
from kvtransfer.link import MAX_PAGES_IN_FLIGHT, LeaseState, SenderLease, SenderLink
from kvtransfer.transports.base import SenderTransport
from prefill_worker.base import Handover, HandoverResult
from prefill_worker.job import PrefillJob
from tandem.messages import (
    Deferred,
    Granted,
    LinkState,
    LinkWelcome,
    Prefill,
    Refused,
    Revoke,
    SenderMessage,
    Shipped,
    Welcome,
)
from worker.base import Outbox
from worker.events import Event, FromRouter


@dataclass(eq=False, slots=True)
class _Shipment:
    """A job on its way over a link."""

    job: PrefillJob
    link: SenderLink
    lease: SenderLease


class LinkHandover(Handover):
    """Handovers over links, one link to each decode worker."""

    def __init__(
        self,
        layout: PageLayout,
        open_transport: Callable[[LinkWelcome], SenderTransport],
        outbox: Outbox,
        max_pages_in_flight: int = MAX_PAGES_IN_FLIGHT,
    ) -> None:
        """
        Args:
            layout: of the pages that are shipped.
            open_transport: binds a transport to the receiver; raises ValueError if it cannot.
        """
        self._layout = layout
        self._open_transport = open_transport
        self._outbox = outbox
        self._max_pages_in_flight = max_pages_in_flight
        # By epoch: the end of a peer's last life may be noticed after the link to its next one has opened.
        self._links: dict[str, SenderLink] = {}
        # Epochs whose end has been asked for and not come yet.
        self._ending: dict[str, None] = {}
        self._shipments: dict[PrefillJob, _Shipment] = {}
        self._results: list[HandoverResult] = []
        # Epochs that ended with copies under way, and whom to tell when the last one has completed.
        self._closing: list[tuple[Completion, Callable[[], None]]] = []
        self._shipped: dict[str, Shipped] = {}  # by transport

    @property
    def continues_here(self) -> bool:
        return False

    @property
    def shipped(self) -> tuple[Shipped, ...]:
        return tuple(self._shipped.values())

    @property
    def is_copying(self) -> bool:
        return bool(self._closing) or any(not copy.done() for s in self._shipments.values() for copy in s.lease.copies)

    def refusal(self, request: Prefill) -> str:
        if self._link_to(request.decode_worker_id) is not None:
            return ""
        return f"no link to decode worker {request.decode_worker_id}"

    def start(self, job: PrefillJob) -> None:
        request = job.request
        link = self._link_to(request.decode_worker_id)
        assert link is not None
        lease = link.request_lease(request.request_id, request.attempt, len(job.sequence.token_ids))
        self._shipments[job] = _Shipment(job, link, lease)

    def advance(self, job: PrefillJob) -> None:
        # The link may have been lost while the chunk was computed; poll reports that.
        shipment = self._shipments.get(job)
        if shipment is not None:
            self._ship(shipment)
            if job.first_token is None:
                shipment.link.renew(shipment.lease)
            elif job.finish_reason and shipment.lease.state is LeaseState.REQUESTED:
                # The request has ended: its pages would be worth having there, but not worth waiting for.
                shipment.link.release(shipment.lease)

    def cancel(self, job: PrefillJob, *, reported: bool) -> None:
        shipment = self._shipments.pop(job, None)
        if shipment is not None:
            shipment.link.release(shipment.lease, reported=reported)

    def receive(self, event: Event) -> None:
        if isinstance(event, FromRouter) and isinstance(event.message, Welcome):
            # A new stream to the router: it knows nothing of links that were open before.
            for link in self._links.values():
                self._tell_up(link)
        elif isinstance(event, SenderLinkOpened):
            self._open(event)
        elif isinstance(event, FromLink):
            self._receive_message(event)
        elif isinstance(event, LinkClosed):
            self._close(event)

    def poll(self) -> list[HandoverResult]:
        for link in self._links.values():
            link.poll()
            if link.failure and link.epoch not in self._ending:
                self._ending[link.epoch] = None
                self._outbox.close_link(link.epoch, link.failure)
        for shipment in self._shipments.values():
            # What the cap on pages in flight held back.
            self._ship(shipment)
        self._closing = [(copies, tell) for copies, tell in self._closing if not _tell_if_done(copies, tell)]
        for shipment in list(self._shipments.values()):
            if shipment.lease.settled:
                self._finish(shipment, _failure(shipment.lease))
        results, self._results = self._results, []
        return results

    def _open(self, event: SenderLinkOpened) -> None:
        epoch = event.welcome.epoch
        try:
            transport = self._open_transport(event.welcome)
        except ValueError as error:
            self._outbox.to_router(LinkState(event.peer_id, event.peer_incarnation, up=False, reason=str(error)))
            self._outbox.close_link(epoch, str(error))
            return

        def send(message: SenderMessage) -> None:
            self._outbox.to_link(epoch, message)

        name = event.welcome.transport
        link = self._links[epoch] = SenderLink(
            event.peer_id, event.peer_incarnation, epoch, name, transport, send, self._max_pages_in_flight
        )
        self._shipped.setdefault(name, Shipped(name, 0, 0))
        self._tell_up(link)

    def _link_to(self, peer_id: str) -> SenderLink | None:
        """The newest link to a peer."""
        return next((link for link in reversed(self._links.values()) if link.peer_id == peer_id), None)

    def _tell_up(self, link: SenderLink) -> None:
        self._outbox.to_router(LinkState(link.peer_id, link.peer_incarnation, up=True))

    def _receive_message(self, event: FromLink) -> None:
        link = self._links.get(event.epoch)
        message = event.message
        if link is None or isinstance(message, Deferred):
            return
        if not isinstance(message, Granted | Refused | Revoke):
            self._outbox.close_link(event.epoch, f"unexpected {type(message).__name__}")
            return
        link.receive(message)
        shipment = next((s for s in self._shipments.values() if s.lease.lease_id == message.lease_id), None)
        if shipment is None:
            return
        if shipment.lease.revoked:
            link.release(shipment.lease)
        elif shipment.lease.state is LeaseState.GRANTED:
            self._ship(shipment)

    def _close(self, event: LinkClosed) -> None:
        link = self._links.pop(event.epoch, None)
        self._ending.pop(event.epoch, None)
        if link is None:
            event.when_quiet()
            return
        self._outbox.to_router(LinkState(link.peer_id, link.peer_incarnation, up=False, reason=event.reason))
        copies = link.close()
        if not _tell_if_done(copies, event.when_quiet):
            self._closing.append((copies, event.when_quiet))

    def _ship(self, shipment: _Shipment) -> None:
        """Pushes the pages that are complete and not pushed yet; after the last chunk the partial page too."""
        job, lease = shipment.job, shipment.lease
        if lease.state is not LeaseState.GRANTED:
            return
        grant = lease.grant
        assert grant is not None and job.handle is not None
        num_tokens = len(job.sequence.token_ids)
        num_pages = self._layout.num_pages_for(num_tokens)
        first_page, misaligned = divmod(grant.cached_len, self._layout.page_size)
        if misaligned or grant.cached_len > num_tokens or len(grant.page_ids) < num_pages - first_page:
            shipment.link.release(lease)
            return
        is_done = job.first_token is not None
        num_ready = num_pages if is_done else job.computed_len // self._layout.page_size
        num_pushed = lease.num_pages_pushed
        start = first_page + num_pushed
        num_to_push = min(max(0, num_ready - start), shipment.link.num_pages_allowed())
        if num_to_push:
            shipment.link.push(
                lease,
                job.handle.page_ids[start : start + num_to_push],
                grant.page_ids[num_pushed : num_pushed + num_to_push],
            )
            self._count(shipment.link.transport_name, num_to_push)
            job.copies = lease.copies
        if job.first_token is not None and start + num_to_push >= num_pages:
            shipment.link.commit(
                lease,
                first_token=job.first_token,
                num_pages=lease.num_pages_pushed,
                num_tokens=num_tokens,
                finish_reason=job.finish_reason,
                first_token_time_ns=job.first_token_time_ns,
                logprobs=job.logprobs,
            )

    def _count(self, transport: str, num_pages: int) -> None:
        before = self._shipped[transport]
        self._shipped[transport] = Shipped(
            transport, before.num_pages + num_pages, before.num_bytes + num_pages * self._layout.page_bytes
        )

    def _finish(self, shipment: _Shipment, failure: str) -> None:
        del self._shipments[shipment.job]
        shipment.job.copies = shipment.lease.copies
        # A request that its first token has ended cannot fail any more.
        self._results.append(HandoverResult(shipment.job, "" if shipment.job.finish_reason else failure))


def _failure(lease: SenderLease) -> str:
    """Why a settled lease did not end in Committed, or ""."""
    match lease.state:
        case LeaseState.COMMITTED:
            return ""
        case LeaseState.REFUSED:
            return f"the decode worker refused the lease: {lease.refusal}"
        case LeaseState.LOST:
            return "the link to the decode worker was lost"
        case _:
            return "the lease ended before the pages were there"


def _tell_if_done(copies: Completion, tell: Callable[[], None]) -> bool:
    if copies.done():
        tell()
        return True
    return False
