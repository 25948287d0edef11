"""What a decode worker keeps of one lease: a WaitingLease until it is answered, a GrantedLease from its grant on."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.decode_worker.admissions import AttemptKey
from tandem.engine.kvcache.base import Completion
from tandem.engine.kvcache.cache_manager import PageHandle
from tandem.kvtransfer.receiver_link import ReceiverLink
from tandem.lifecycle import now_ns
from tandem.messages import Admit, Committed, LeaseRequest, Pushing


@dataclass(eq=False, slots=True)
class WaitingLease:
    """A request for pages that the lease book cannot answer yet: its Admit is still on its way, or there are no pages.

    Attributes:
        deadline: when it is refused if its Admit has not come.
        admit: the request, once its Admit is here; the lease stands in line for pages from then on.
        place: where it stands in line; smaller is sooner.
        num_overtaken: how often a later one that fitted was granted first.
        asked_ns: when it came, in nanoseconds since the epoch.
    """

    request: LeaseRequest
    link: ReceiverLink
    deadline: float = 0.0
    admit: Admit | None = None
    place: tuple[int, int] = (0, 0)
    num_overtaken: int = 0
    asked_ns: int = field(default_factory=now_ns)

    @property
    def lease_id(self) -> str:
        return self.request.lease_id

    @property
    def key(self) -> AttemptKey:
        return self.request.request_id, self.request.attempt


@dataclass(eq=False, slots=True)
class GrantedLease:
    """Pages that the lease book has promised and a prefill worker writes, from the grant until it is settled and what
    was committed has arrived.

    Attributes:
        page_ids: the destinations that were granted, in order.
        deadline: when it is asked back, unless its sender is heard of.
        abandoned: the request ended here; the pages wait for the settlement, and for nothing else.
        revoked: the sender has been asked for it; what is pushed for it from then on is thrown away.
        receives: two-sided transports: what must complete before the pages hold what was committed, or may be reused.
        committed: the settlement, while `receives` are under way; it came at `committed_ns`.
    """

    lease_id: str
    admit: Admit
    handle: PageHandle
    page_ids: Sequence[int]
    link: ReceiverLink
    deadline: float
    granted_ns: int
    abandoned: bool = False
    revoked: bool = False
    receives: list[Completion] = field(default_factory=list)
    committed: Committed | None = None
    committed_ns: int = 0

    @property
    def key(self) -> AttemptKey:
        return self.admit.request_id, self.admit.attempt

    def destinations(self, push: Pushing) -> Sequence[int] | None:
        """Where the pages of a push belong; None: nowhere any more.

        Raises:
            ValueError: it carries more pages than were granted.
        """
        if self.revoked:
            return None
        page_ids = self.page_ids[push.offset : push.offset + push.num_pages]
        if len(page_ids) != push.num_pages:
            raise ValueError(f"push {push.link_seq} does not fit the grant of lease {self.lease_id}")
        return page_ids
