"""The link's protocol: leases, order and settlement on one epoch, the same for every transport.

Both ends are plain state machines of the engine thread. They send messages through a function they are given and are
told of messages by `receive`; gRPC is elsewhere (kvtransfer/streams.py).
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from engine.kvcache.base import Completion
from kvtransfer.transports.base import ReceiverTransport, SenderTransport
from tandem.messages import (
    Committed,
    Deferred,
    Granted,
    LeaseRequest,
    Pushing,
    ReceiverMessage,
    Refused,
    Released,
    Renewed,
    Revoke,
    SenderMessage,
)
from tandem.sampling_params import TokenLogprobs

# 512 pages of 2 MiB take 2.8 ms over NVLink.
MAX_PAGES_IN_FLIGHT = 512


class LeaseState(Enum):
    """A lease at its sender. The last four are final."""

    REQUESTED = auto()
    GRANTED = auto()
    COMMITTING = auto()  # Committed goes out when the last copy has completed
    RELEASING = auto()  # Released goes out then
    COMMITTED = auto()
    RELEASED = auto()
    REFUSED = auto()
    LOST = auto()  # the epoch ended


@dataclass(eq=False, slots=True)
class SenderLease:
    """One lease as its sender sees it. Only its SenderLink changes it.

    Attributes:
        grant: the receiver's pages, once granted.
        copies: pushes that may still run.
        refusal: the receiver's reason, in state REFUSED.
        revoked: the receiver asks for the lease back.
    """

    lease_id: str
    state: LeaseState = LeaseState.REQUESTED
    grant: Granted | None = None
    copies: list[Completion] = field(default_factory=list)
    num_pages_pushed: int = 0
    refusal: str = ""
    revoked: bool = False
    _commit: Committed | None = None
    _reported: bool = True

    @property
    def settled(self) -> bool:
        return self.state in (LeaseState.COMMITTED, LeaseState.RELEASED, LeaseState.REFUSED, LeaseState.LOST)


class SenderLink:
    """The prefill worker's end of one epoch of a link."""

    def __init__(
        self,
        peer_id: str,
        peer_incarnation: str,
        epoch: str,
        transport_name: str,
        transport: SenderTransport,
        send: Callable[[SenderMessage], None],
        max_pages_in_flight: int = MAX_PAGES_IN_FLIGHT,
    ) -> None:
        """Args: max_pages_in_flight: pages submitted and not completed at most, so that an abort is soon over."""
        self.peer_id = peer_id
        self.peer_incarnation = peer_incarnation
        self.epoch = epoch
        self.transport_name = transport_name
        self._transport = transport
        self._send = send
        self._leases: dict[str, SenderLease] = {}
        self._max_pages_in_flight = max_pages_in_flight
        # Copies under way, with their numbers of pages; in order.
        self._in_flight: list[tuple[Completion, int]] = []
        self._next_seq = 0
        self._closed = False

    @property
    def failure(self) -> str:
        """Why the epoch must end, or ""."""
        return self._transport.failure

    def num_pages_allowed(self) -> int:
        """Pages that may be pushed now."""
        self._in_flight = [(copy, n) for copy, n in self._in_flight if not copy.done()]
        return max(0, self._max_pages_in_flight - sum(n for _, n in self._in_flight))

    def request_lease(self, request_id: str, attempt: int, num_tokens: int) -> SenderLease:
        """Asks for pages; the caller holds the pages of the whole prompt already."""
        assert not self._closed
        lease = SenderLease(uuid.uuid4().hex)
        self._leases[lease.lease_id] = lease
        self._send(LeaseRequest(lease.lease_id, request_id, attempt, num_tokens))
        return lease

    def push(self, lease: SenderLease, src_pages: Sequence[int], dst_pages: Sequence[int]) -> None:
        """Starts copying the next pages of a granted lease, no more than num_pages_allowed."""
        assert lease.state is LeaseState.GRANTED and not self._closed
        if self._transport.two_sided:
            self._send(Pushing(self._next_seq, lease.lease_id, lease.num_pages_pushed, len(src_pages)))
        copy = self._transport.push(self._next_seq, src_pages, dst_pages)
        lease.copies.append(copy)
        lease.num_pages_pushed += len(src_pages)
        self._in_flight.append((copy, len(src_pages)))
        self._next_seq += 1

    def commit(
        self,
        lease: SenderLease,
        *,
        first_token: int,
        num_pages: int,
        num_tokens: int,
        finish_reason: str,
        first_token_time_ns: int,
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        """Settles a granted lease whose pages have all been pushed, once their copies have completed."""
        assert lease.state is LeaseState.GRANTED and not self._closed
        lease.state = LeaseState.COMMITTING
        lease._commit = Committed(
            lease.lease_id, first_token, num_pages, num_tokens, finish_reason, first_token_time_ns, logprobs
        )
        self._settle_if_quiet(lease)

    def renew(self, lease: SenderLease) -> None:
        """Prefill goes on: the lease's duration starts again."""
        if not lease.settled:
            self._send(Renewed(lease.lease_id))

    def release(self, lease: SenderLease, *, reported: bool = True) -> None:
        """Settles a lease that is no longer wanted, whether granted yet or not, once its copies have completed.

        Args:
            reported: whether the router hears from this worker how the attempt ended.
        """
        if not lease.settled and lease.state is not LeaseState.COMMITTING:
            lease.state = LeaseState.RELEASING
            lease._reported = reported
            self._settle_if_quiet(lease)

    def receive(self, message: ReceiverMessage) -> None:
        """Takes a message from the receiver. One about a settled lease crossed its settlement and says nothing new."""
        if not isinstance(message, Granted | Deferred | Refused | Revoke):
            raise ValueError(f"unexpected {type(message).__name__} on an open link")
        lease = self._leases.get(message.lease_id)
        if lease is None:
            return
        if isinstance(message, Granted) and lease.state is LeaseState.REQUESTED:
            lease.grant = message
            lease.state = LeaseState.GRANTED
        elif isinstance(message, Refused):
            lease.refusal = message.reason
            self._finish(lease, LeaseState.REFUSED)
        elif isinstance(message, Revoke):
            lease.revoked = True

    def poll(self) -> None:
        """Sends the settlements whose copies have completed."""
        for lease in list(self._leases.values()):
            self._settle_if_quiet(lease)

    def close(self) -> Completion:
        """Ends the epoch: every open lease is lost. The completion means that no copy touches the receiver's pages
        any more; only then may a new epoch open."""
        self._closed = True
        for lease in list(self._leases.values()):
            self._finish(lease, LeaseState.LOST)
        return self._transport.abort()

    def _settle_if_quiet(self, lease: SenderLease) -> None:
        # After a failure of the transport copies are over without having arrived. The epoch ends soon, and its leases
        # with it.
        if lease.state not in (LeaseState.COMMITTING, LeaseState.RELEASING) or self._transport.failure:
            return
        lease.copies = [c for c in lease.copies if not c.done()]
        if lease.copies:
            return
        if lease.state is LeaseState.COMMITTING:
            assert lease._commit is not None
            self._send(lease._commit)
            self._finish(lease, LeaseState.COMMITTED)
        else:
            self._send(Released(lease.lease_id, lease._reported))
            self._finish(lease, LeaseState.RELEASED)

    def _finish(self, lease: SenderLease, state: LeaseState) -> None:
        lease.state = state
        del self._leases[lease.lease_id]


class Quiet:
    """Completion of a receiver's epoch: nothing of it can write this worker's pages any more."""

    def __init__(self, sender_is_gone: Callable[[], bool]) -> None:
        """Args: sender_is_gone: whether the sender's process has exited, and a settle time has passed since."""
        self._sender_is_gone = sender_is_gone
        self._done = False

    def mark(self) -> None:
        """The sender said so itself, by opening its next epoch."""
        self._done = True

    def done(self) -> bool:
        self._done = self._done or self._sender_is_gone()
        return self._done


class _Received:
    """A receive is over when it is done, or when nothing of its epoch can touch this worker's pages any more."""

    def __init__(self, receive: Completion, link: "ReceiverLink") -> None:
        self._receive = receive
        self._link = link

    def done(self) -> bool:
        return self._receive.done() or self._link.is_quiet()


class _Grant:
    """What a receiver's link knows of a granted lease."""

    __slots__ = ("page_ids", "receives", "wanted")

    def __init__(self, page_ids: Sequence[int]) -> None:
        self.page_ids = list(page_ids)
        self.receives: list[Completion] = []
        self.wanted = True


class ReceiverLink:
    """The decode worker's end of one epoch of a link. It keeps the account of granted leases: each is settled by
    exactly one Committed or Released, or by the epoch's end."""

    def __init__(
        self,
        sender_id: str,
        sender_incarnation: str,
        epoch: str,
        transport: ReceiverTransport,
        quiet: Quiet,
        send: Callable[[ReceiverMessage], None],
    ) -> None:
        self.sender_id = sender_id
        self.sender_incarnation = sender_incarnation
        self.epoch = epoch
        self.quiet = quiet
        self._transport = transport
        self._send = send
        self._grants: dict[str, _Grant] = {}
        self._closed: Completion | None = None

    @property
    def failure(self) -> str:
        """Why the epoch must end, or ""."""
        return self._transport.failure

    def grant(self, lease_id: str, cached_len: int, page_ids: Sequence[int]) -> None:
        assert lease_id not in self._grants
        self._grants[lease_id] = _Grant(page_ids)
        self._send(Granted(lease_id, cached_len, tuple(page_ids)))

    def defer(self, lease_id: str) -> None:
        self._send(Deferred(lease_id))

    def refuse(self, lease_id: str, reason: str) -> None:
        self._send(Refused(lease_id, reason))

    def revoke(self, lease_id: str) -> None:
        """Asks for a lease back; what is pushed for it from now on is received and thrown away."""
        if lease_id in self._grants:
            self._grants[lease_id].wanted = False
            self._send(Revoke(lease_id))

    def expect(self, message: Pushing) -> None:
        """A push is announced. Its number runs on both sides, whatever has become of its lease: otherwise all later
        pushes of the link would wait for ever."""
        grant = self._grants.get(message.lease_id)
        pages = None
        if grant is not None and grant.wanted:
            pages = grant.page_ids[message.offset : message.offset + message.num_pages]
            if len(pages) != message.num_pages:
                raise ValueError(f"push {message.link_seq} does not fit the grant of lease {message.lease_id}")
        receive = self._transport.expect(message.link_seq, pages, message.num_pages)
        if grant is not None:
            grant.receives.append(_Received(receive, self))

    def settle(self, message: Committed | Released) -> list[Completion] | None:
        """Returns what must complete before the pages hold what was sent, or may be reused; None if the message
        settles no granted lease (it was waiting or refused). Once the link is closed, completion says only that the
        pages may be reused."""
        grant = self._grants.pop(message.lease_id, None)
        return None if grant is None else grant.receives

    def close(self) -> Completion:
        """Ends the epoch. The completion means that nothing of it can touch this worker's pages any more."""
        aborted = self._transport.abort()
        self._closed = aborted if self._transport.two_sided else self.quiet
        return self._closed

    def is_quiet(self) -> bool:
        """Whether the link is closed and nothing of it can touch this worker's pages any more."""
        return self._closed is not None and self._closed.done()
