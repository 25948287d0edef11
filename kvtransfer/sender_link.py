"""The prefill worker's end of a link: it asks for leases, pushes pages and settles, in the same way on every transport.

A plain state machine of the engine thread. It sends messages through a function that it is given, and is told of those
that come by `receive_from_peer`; gRPC is elsewhere (kvtransfer/link_dialer.py).
"""

import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from tandem.engine.kvcache.base import Completion
from tandem.kvtransfer.transports.base import SenderTransport
from tandem.lifecycle import now_ns
from tandem.messages import (
    Committed,
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

# Copies that have been submitted cannot be taken back, so there is a cap on them: an abort must be over soon. This many
# pages of 2 MiB take 2.8 ms over NVLink.
MAX_PAGES_IN_FLIGHT = 512


class SenderLeaseState(Enum):
    """A lease at its sender. The last four are final.

    COMMITTING and RELEASING say what will be sent when the last copy has completed. LOST is what the end of the epoch
    makes of every lease that is not settled.
    """

    REQUESTED = auto()
    GRANTED = auto()
    COMMITTING = auto()
    RELEASING = auto()
    COMMITTED = auto()
    RELEASED = auto()
    REFUSED = auto()
    LOST = auto()


FINAL_STATES = frozenset(
    (SenderLeaseState.COMMITTED, SenderLeaseState.RELEASED, SenderLeaseState.REFUSED, SenderLeaseState.LOST)
)


@dataclass(eq=False, slots=True)
class SenderLease:
    """One lease as its sender sees it, from the request to its settlement: LinkHandover has one for each job that is on
    its way, and only the link changes it.

    Attributes:
        link: the epoch that it belongs to.
        grant: the receiver's pages, once granted.
        copies: pushes that may still run.
        settled_ns: when it was settled; 0: it has not been.
        refusal: the receiver's reason, in state REFUSED.
        revoked: the receiver asks for the lease back.
    """

    lease_id: str
    link: "SenderLink"
    state: SenderLeaseState = SenderLeaseState.REQUESTED
    grant: Granted | None = None
    copies: list[Completion] = field(default_factory=list)
    num_pages_pushed: int = 0
    settled_ns: int = 0
    refusal: str = ""
    revoked: bool = False
    settlement: Committed | Released | None = None

    @property
    def settled(self) -> bool:
        return self.state in FINAL_STATES


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
        # Of these the COMMITTING and RELEASING ones, which are looked at often.
        self._settling: dict[str, SenderLease] = {}
        self._max_pages_in_flight = max_pages_in_flight
        # The copies under way stand here in order, each with its number of pages.
        self._in_flight: deque[tuple[Completion, int]] = deque()
        # Some of them have ended since settlements were looked at.
        self._some_copied = False
        # When the oldest of a row of copies was pushed, and how long all rows before took.
        self._copying_since_ns = 0
        self._copied_for_ns = 0
        self._next_seq = 0
        self._ended = False

    @property
    def failure(self) -> str:
        """Why the epoch must end, or ""."""
        return self._transport.failure

    @property
    def is_copying(self) -> bool:
        """Whether something is to be done when copies are over, which were not when `send_settlements` last looked.
        That they are now is no reason to say no: who sleeps at that would leave it undone."""
        return bool(self._in_flight or self._settling)

    @property
    def copying_ns(self) -> int:
        """How long at least one copy was under way so far, in nanoseconds."""
        return self._copied_for_ns + (now_ns() - self._copying_since_ns if self._in_flight else 0)

    def num_pages_allowed(self) -> int:
        """Pages that may be pushed now."""
        self._forget_copied()
        return max(0, self._max_pages_in_flight - sum(n for _, n in self._in_flight))

    def request_lease(self, request_id: str, attempt: int, num_tokens: int) -> SenderLease:
        """Asks for pages; the caller holds the pages of the whole prompt already."""
        assert not self._ended
        lease = SenderLease(uuid.uuid4().hex, self)
        self._leases[lease.lease_id] = lease
        self._send(LeaseRequest(lease.lease_id, request_id, attempt, num_tokens))
        return lease

    def push_pages(self, lease: SenderLease, src_pages: Sequence[int], dst_pages: Sequence[int]) -> None:
        """Starts copying the next pages of a granted lease, no more than num_pages_allowed."""
        assert lease.state is SenderLeaseState.GRANTED and not self._ended
        if self._transport.two_sided:
            self._send(Pushing(self._next_seq, lease.lease_id, lease.num_pages_pushed, len(src_pages)))
        if not self._in_flight:
            self._copying_since_ns = now_ns()
        copy = self._transport.copy_pages(self._next_seq, src_pages, dst_pages)
        lease.copies.append(copy)
        lease.num_pages_pushed += len(src_pages)
        self._in_flight.append((copy, len(src_pages)))
        self._next_seq += 1

    def commit_pages(self, lease: SenderLease, committed: Committed) -> None:
        """Settles a granted lease after its last push, once the copies have completed."""
        assert lease.state is SenderLeaseState.GRANTED and not self._ended
        self._settle_after_copies(lease, SenderLeaseState.COMMITTING, committed)

    def renew_lease(self, lease: SenderLease) -> None:
        """Prefill goes on: the lease's duration starts again."""
        if not lease.settled:
            self._send(Renewed(lease.lease_id))

    def release_lease(self, lease: SenderLease, *, reported: bool = True) -> None:
        """Settles a lease that is no longer wanted, whether granted yet or not, once its copies have completed.

        Args:
            reported: whether the router hears from this worker how the attempt ended.
        """
        if not lease.settled and lease.state is not SenderLeaseState.COMMITTING:
            self._settle_after_copies(lease, SenderLeaseState.RELEASING, Released(lease.lease_id, reported))

    def receive_from_peer(self, message: ReceiverMessage) -> None:
        """Takes a message from the receiver. One about a settled lease crossed its settlement and says nothing new.

        Raises:
            ValueError: it is none that an open link takes.
        """
        if not isinstance(message, Granted | Refused | Revoke):
            raise ValueError(f"unexpected {type(message).__name__} on an open link")
        lease = self._leases.get(message.lease_id)
        if lease is None:
            return
        if isinstance(message, Granted) and lease.state is SenderLeaseState.REQUESTED:
            lease.grant = message
            lease.state = SenderLeaseState.GRANTED
        elif isinstance(message, Refused):
            lease.refusal = message.reason
            self._settle(lease, SenderLeaseState.REFUSED)
        elif isinstance(message, Revoke):
            lease.revoked = True

    def send_settlements(self) -> None:
        """Sends those whose copies have completed. Where none has, only the oldest copy is looked at."""
        self._forget_copied()
        if self._some_copied:
            self._some_copied = False
            for lease in list(self._settling.values()):
                self._settle_if_copied(lease)

    def end_epoch(self) -> Completion:
        """Every open lease is lost. The completion means that no copy touches the receiver's pages any more; only then
        may a new epoch open."""
        self._ended = True
        for lease in list(self._leases.values()):
            self._settle(lease, SenderLeaseState.LOST)
        return self._transport.abort()

    def _forget_copied(self) -> None:
        # They end in the order in which they were submitted.
        while self._in_flight and self._in_flight[0][0].done():
            self._in_flight.popleft()
            self._some_copied = True
            if not self._in_flight:
                self._copied_for_ns += now_ns() - self._copying_since_ns

    def _settle_after_copies(
        self, lease: SenderLease, state: SenderLeaseState, settlement: Committed | Released
    ) -> None:
        lease.state = state
        lease.settlement = settlement
        self._settling[lease.lease_id] = lease
        self._settle_if_copied(lease)

    def _settle_if_copied(self, lease: SenderLease) -> None:
        lease.copies = [c for c in lease.copies if not c.done()]
        # After a failure of the transport copies are over without having arrived; it is told before they are over, so
        # it is asked for after them. The epoch ends soon, and its leases with it.
        if lease.copies or self._transport.failure:
            return
        assert lease.settlement is not None
        self._send(lease.settlement)
        is_commit = isinstance(lease.settlement, Committed)
        self._settle(lease, SenderLeaseState.COMMITTED if is_commit else SenderLeaseState.RELEASED)

    def _settle(self, lease: SenderLease, state: SenderLeaseState) -> None:
        lease.state = state
        lease.settled_ns = now_ns()
        del self._leases[lease.lease_id]
        self._settling.pop(lease.lease_id, None)
