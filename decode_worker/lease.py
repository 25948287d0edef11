from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from tandem.decode_worker.admissions import AttemptKey
from tandem.engine.kvcache.base import Completion
from tandem.engine.kvcache.cache_manager import PageHandle
from tandem.kvtransfer.receiver_link import ReceiverLink
from tandem.lifecycle import now_ns
from tandem.messages import Admit, Committed, LeaseRequest, Pushing


class LeaseState(Enum):
    """State of a lease. Refused, released and lost leases are forgotten.

    PARKED: its Admit has not arrived. QUEUED: it waits for pages. GRANTED: a prefill worker writes its pages.
    COMMITTED: it is settled, and its last pages may still be arriving.
    """

    PARKED = auto()
    QUEUED = auto()
    GRANTED = auto()
    COMMITTED = auto()


@dataclass(eq=False, slots=True)
class Lease:
    """One lease, from its LeaseRequest until its pages have arrived or are freed.

    Fields marked with a state are unset before it.

    Attributes:
        link: epoch on which the sender asked.
        deadline: PARKED: time of its refusal. GRANTED: time of its Revoke, renewed by its messages.
        place: position in the queue, the smallest first (QUEUED).
        num_overtaken: number of younger leases granted before it.
        handle, granted_ns: the granted pages and the time (GRANTED).
        receives: receives of a two-sided transport that must complete before the pages are used or freed.
        abandoned: the attempt has ended; the pages wait for the settlement.
        revoked: a Revoke was sent; later pushes are discarded.
        committed, committed_ns: the settlement and its time (COMMITTED).
    """

    request: LeaseRequest
    link: ReceiverLink
    state: LeaseState = LeaseState.PARKED
    asked_ns: int = field(default_factory=now_ns)
    deadline: float = 0.0
    admit: Admit = field(init=False, repr=False)
    place: tuple[int, int] = field(init=False, repr=False)
    num_overtaken: int = 0
    handle: PageHandle = field(init=False, repr=False)
    granted_ns: int = field(init=False, repr=False)
    receives: list[Completion] = field(default_factory=list)
    abandoned: bool = False
    revoked: bool = False
    committed: Committed = field(init=False, repr=False)
    committed_ns: int = field(init=False, repr=False)

    @property
    def lease_id(self) -> str:
        return self.request.lease_id

    @property
    def key(self) -> AttemptKey:
        return self.request.request_id, self.request.attempt

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of earlier attempts' output."""
        return len(self.admit.prompt_ids) + len(self.admit.output_ids)

    @property
    def granted_pages(self) -> Sequence[int]:
        """Destination pages in order, including the page of the first decode step."""
        return self.handle.page_ids[self.handle.num_shared :]

    def destinations(self, push: Pushing) -> Sequence[int] | None:
        """Returns a push's destination pages, or None to discard it.

        Raises:
            ValueError: the push does not fit the grant.
        """
        if self.revoked:
            return None
        page_ids = self.granted_pages[push.offset : push.offset + push.num_pages]
        if len(page_ids) != push.num_pages:
            raise ValueError(f"push {push.link_seq} does not fit the grant of lease {self.lease_id}")
        return page_ids
