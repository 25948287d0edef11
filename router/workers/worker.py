"""A worker as the router knows it, and the two that serve an attempt together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.forward_times import start_times
from tandem.messages import ForwardTimes, Hello, LinkState, RouterMessage, WorkerStats
from tandem.router.workers.distance import distance
from tandem.router.workers.leans import NO_LEAN, Lean
from tandem.router.workers.peer_counts import NOTHING, AssignedLoad
from tandem.router.workers.placement import AGGREGATED, DISAGGREGATED, Placement
from tandem.router.workers.rates import ClusterRates
from tandem.router.workers.worker_prefixes import WorkerPrefixes

# As long as a worker has not said how many.
ANY_NUMBER = 2**31
NOT_SAID = ForwardTimes()


@dataclass(eq=False, slots=True)
class Worker:
    """One life of a worker as the router sees it: its control stream, from Hello to the end of it.

    Attributes:
        send: writes to its control stream.
        disconnect: ends its control stream, with a reason for it.
        last_heard: on the router's clock, when a message last came.
        last_progress: on the router's clock, when its scheduler's step number last changed.
        last_heartbeat: on the router's clock, when `stats` came.
        num_steps: that number; -1 before the first heartbeat.
        stats: what it said of itself in its last heartbeat.
        links_up: decode workers this prefill worker has a link to, with the life of them that it is to.
        links_down: what it last said of decode workers that it has no link to.
        decode_workers: those that can go on with what it has computed, by their ids: the lives of workers that decode,
            are here, and that it has a link to; itself in role `both`. The registry keeps this.
        prefixes: what it says that it has cached; nothing where no policy wants to know.
        num_assigned: requests that it serves now, by the routers' own counts, which are fresher than a heartbeat.
        num_pending_tokens: tokens of those that it has yet to prefill, without what it was thought to have cached.
        num_decoding: of those, the ones that it decodes, or is going to.
        num_kv_tokens: tokens of their prompts, and of the outputs that they came with.
        num_arriving_tokens: of these, the ones that are not thought to be cached there, of requests of which it has
            sent no token yet.
        assigned_here, assigned_elsewhere: what this router's and other routers' requests make of these five.
        load_number: goes up when one of them changes, or what it says of its pool.
        forward_times: how long its forwards take, by its own word; `load_number` goes up when they change.
        rates: what this router has seen of the whole cluster.
        role, sends, receives: its role, and whether it hands over to other workers and takes over from them.
        page_size: tokens of one KV page; the same for all workers of a cluster.
        host, rack: where it is (router/workers/distance.py).
        num_starting: of this router's, those of which the decode worker has sent no token yet.
        num_suspects: of this router's, those that may have ended workers (router/attempts.py).
        lean: which work it is to be given first.
    """

    hello: Hello
    send: Callable[[Sequence[RouterMessage]], None]
    disconnect: Callable[[str], None]
    last_heard: float
    last_progress: float
    last_heartbeat: float = 0.0
    num_steps: int = -1
    stats: WorkerStats = field(default_factory=WorkerStats)
    links_up: dict[str, str] = field(default_factory=dict)
    links_down: dict[str, LinkState] = field(default_factory=dict)
    decode_workers: "dict[str, Worker]" = field(default_factory=dict)
    prefixes: WorkerPrefixes = field(default_factory=WorkerPrefixes)
    num_assigned: int = 0
    num_pending_tokens: int = 0
    num_decoding: int = 0
    num_kv_tokens: int = 0
    num_arriving_tokens: int = 0
    load_number: int = 0
    assigned_here: AssignedLoad = NOTHING
    assigned_elsewhere: AssignedLoad = NOTHING
    num_starting: int = 0
    num_suspects: int = 0
    lean: Lean = NO_LEAN
    forward_times: ForwardTimes = field(init=False)
    rates: ClusterRates = field(init=False)
    role: str = field(init=False)
    sends: bool = field(init=False)
    receives: bool = field(init=False)
    page_size: int = field(init=False)
    host: str = field(init=False)
    rack: str = field(init=False)

    def __post_init__(self) -> None:
        self.forward_times = start_times(self.hello.device)
        self.rates = ClusterRates(self.hello.device)
        # They are asked for of every worker at every choice.
        self.role = self.hello.role
        self.host, self.rack = self.hello.host, self.hello.rack
        self.sends = self.role == "prefill" or self.hello.has_links
        self.page_size = self.hello.page_size
        self.receives = self.role == "decode" or self.hello.has_links

    def add_load(
        self,
        num_requests: int = 0,
        num_pending_tokens: int = 0,
        num_decoding: int = 0,
        num_kv_tokens: int = 0,
        num_arriving_tokens: int = 0,
    ) -> None:
        """This router's part of its load has changed by so much."""
        change = AssignedLoad(num_requests, num_pending_tokens, num_decoding, num_kv_tokens, num_arriving_tokens)
        self.assigned_here = self.assigned_here.plus(change)
        self._count_load(change)

    def set_load_elsewhere(self, load: AssignedLoad) -> None:
        """The other routers have said what theirs is."""
        if load != self.assigned_elsewhere:
            change = load.minus(self.assigned_elsewhere)
            self.assigned_elsewhere = load
            self._count_load(change)

    def take_stats(self, stats: WorkerStats) -> None:
        """It has said how it is."""
        old, self.stats = self.stats, stats
        if stats.forward_times not in (NOT_SAID, self.forward_times):
            self.forward_times = stats.forward_times
            self.load_number += 1
        elif (old.num_leased_pages, old.num_locked_pages) != (stats.num_leased_pages, stats.num_locked_pages):
            self.load_number += 1

    def set_lean(self, lean: Lean) -> bool:
        """Which work it is to be given first; returns whether that is another than before."""
        if lean == self.lean:
            return False
        self.lean = lean
        self.load_number += 1
        return True

    def _count_load(self, change: AssignedLoad) -> None:
        self.num_assigned += change.num_requests
        self.num_pending_tokens += change.num_pending_tokens
        self.num_decoding += change.num_decoding
        self.num_kv_tokens += change.num_kv_tokens
        self.num_arriving_tokens += change.num_arriving_tokens
        self.load_number += 1

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id

    @property
    def num_pool_tokens(self) -> int:
        """Tokens that its pool holds."""
        return self.hello.num_pages * self.page_size

    @property
    def max_decoding(self) -> int:
        """Requests that it decodes side by side at most."""
        return self.hello.max_batch_size or ANY_NUMBER

    @property
    def num_held_tokens(self) -> int:
        """Tokens of its pool that nobody else can have: what it said in its last heartbeat, however many requests share
        it, and what is on its way there without a lease. What is cached and not in use makes room."""
        leased = self.stats.num_leased_pages * self.page_size
        return self.stats.num_locked_pages * self.page_size + max(leased, self.num_arriving_tokens)

    @property
    def max_request_tokens(self) -> int:
        """Tokens of the largest request that it takes."""
        return (self.hello.max_request_pages or self.hello.num_pages) * self.page_size

    @property
    def incarnation(self) -> str:
        """Names this life of the worker: one that is started again has another, and an empty cache."""
        return self.hello.incarnation


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a policy expects of the pair that it has chosen, beside what the other pairs would have given.

    Attributes:
        num_to_compute: prompt tokens that the prefill worker has not cached.
        num_to_store: those that the decode worker has not cached; None: nobody knows, so all may be.
        num_elsewhere: those that half of the workers or more would have to compute at least; None: nobody knows.
        reason: why this pair, in one of the policy's words for a ledger; "": it does not say.
        ttft_s: from the choice to the first token; 0: it does not say.
        itl_s: between two tokens, at the decode worker; 0: it does not say.
    """

    num_to_compute: int
    reason: str = ""
    ttft_s: float = 0.0
    itl_s: float = 0.0
    num_to_store: int | None = None
    num_elsewhere: int | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """The workers of one attempt: `prefill` and `decode` may be one and the same in role `both`.

    Attributes:
        estimate: of what becomes of the attempt; None: the policy makes none.
    """

    prefill: Worker
    decode: Worker
    estimate: Estimate | None = field(default=None, compare=False)

    @property
    def placement(self) -> Placement:
        return AGGREGATED if self.prefill is self.decode else DISAGGREGATED

    @property
    def distance(self) -> int | None:
        """Between its workers (router/workers/distance.py); None: it is one worker."""
        return None if self.prefill is self.decode else distance(self.prefill, self.decode)
