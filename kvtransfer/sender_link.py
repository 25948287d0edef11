"""The prefill worker's end of a link, for all transports. A plain state machine of the engine thread; link_dialer.py
does the gRPC."""

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

# Bounds the time of an abort: submitted copies cannot be taken back. 512 pages of 2 MiB take 2.8 ms over NVLink.
MAX_PAGES_IN_FLIGHT = 512


class SenderLeaseState(Enum):
    """State of a lease at its sender.

    COMMITTING and RELEASING wait for the last copy before the settlement is sent. The epoch's end makes every unsettled
    lease LOST.
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
    """One lease at its sender, from its request to its settlement. Only its link changes it.

    Attributes:
        grant: the receiver's pages, once granted.
        copies: pushes that may still run.
        settled_ns: time of the settlement; 0 before it.
        refusal: the receiver's reason, in state REFUSED.
        revoked: whether the receiver has asked for it back.
        settlement: message to send after the last copy.
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
        self.peer_id = peer_id
        self.peer_incarnation = peer_incarnation
        self.epoch = epoch
        self.transport_name = transport_name
        self._transport = transport
        self._send = send
        self._leases: dict[str, SenderLease] = {}
        # Leases in COMMITTING or RELEASING.
        self._settling: dict[str, SenderLease] = {}
        self._max_pages_in_flight = max_pages_in_flight
        # Copies in order, each with its number of pages.
        self._in_flight: deque[tuple[Completion, int]] = deque()
        # Whether copies have ended since settlements were last checked.
        self._some_copied = False
        # Start of the current series of copies, and the time of earlier series.
        self._copying_since_ns = 0
        self._copied_for_ns = 0
        self._next_seq = 0
        self._ended = False

    @property
    def failure(self) -> str:
        """Reason to end the epoch, or ""."""
        return self._transport.failure

    @property
    def is_copying(self) -> bool:
        """Whether copies or settlements were open when `send_settlements` last checked. Stays True if they have ended
        since: a caller must not sleep with work left."""
        return bool(self._in_flight or self._settling)

    @property
    def copying_ns(self) -> int:
        """Time with at least one copy in flight, in nanoseconds."""
        return self._copied_for_ns + (now_ns() - self._copying_since_ns if self._in_flight else 0)

    def num_pages_allowed(self) -> int:
        self._forget_copied()
        return max(0, self._max_pages_in_flight - sum(n for _, n in self._in_flight))

    def request_lease(self, request_id: str, attempt: int, num_tokens: int) -> SenderLease:
        """Requests a lease. The caller holds the pages of the whole prompt."""
        assert not self._ended
        lease = SenderLease(uuid.uuid4().hex, self)
        self._leases[lease.lease_id] = lease
        self._send(LeaseRequest(lease.lease_id, request_id, attempt, num_tokens))
        return lease

    def push_pages(self, lease: SenderLease, src_pages: Sequence[int], dst_pages: Sequence[int]) -> None:
        """Starts copying the next pages, at most num_pages_allowed."""
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
        """Commits a lease after its last push, once its copies have completed."""
        assert lease.state is SenderLeaseState.GRANTED and not self._ended
        self._settle_after_copies(lease, SenderLeaseState.COMMITTING, committed)

    def renew_lease(self, lease: SenderLease) -> None:
        """Restarts the lease's duration."""
        if not lease.settled:
            self._send(Renewed(lease.lease_id))

    def release_lease(self, lease: SenderLease, *, reported: bool = True) -> None:
        """Releases a lease, granted or not, once its copies have completed. Args: reported: as in Released."""
        if not lease.settled and lease.state is not SenderLeaseState.COMMITTING:
            self._settle_after_copies(lease, SenderLeaseState.RELEASING, Released(lease.lease_id, reported))

    def receive_from_peer(self, message: ReceiverMessage) -> None:
        """Takes a message; ignores one that crossed a settlement. Raises ValueError if it is not allowed on an open
        link."""
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
        """Settles leases whose copies have completed."""
        self._forget_copied()
        if self._some_copied:
            self._some_copied = False
            for lease in list(self._settling.values()):
                self._settle_if_copied(lease)

    def end_epoch(self) -> Completion:
        """Marks open leases as lost. The completion means that no copy touches the receiver's pages; only then may a
        new epoch open."""
        self._ended = True
        for lease in list(self._leases.values()):
            self._settle(lease, SenderLeaseState.LOST)
        return self._transport.abort()

    def _forget_copied(self) -> None:
        # Copies end in the order of their submission.
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
        # After a failure, copies end without arrival. It is set before they end, so check it last. The epoch's end
        # settles the lease.
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
