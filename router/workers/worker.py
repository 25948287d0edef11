"""The router's view of a worker, and pairs."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tandem.forward_times import start_times
from tandem.messages import ForwardTimes, Hello, LinkState, RouterMessage, Shipped, WorkerStats
from tandem.router.workers.distance import distance
from tandem.router.workers.leans import NO_LEAN, Lean
from tandem.router.workers.peer_counts import NOTHING, AssignedLoad
from tandem.router.workers.placement import AGGREGATED, DISAGGREGATED, Placement
from tandem.router.workers.rates import ClusterRates
from tandem.router.workers.store_registry import NodeStore
from tandem.router.workers.worker_prefixes import WorkerPrefixes

# Value for a worker that reports no limit.
ANY_NUMBER = 2**31
NOT_SAID = ForwardTimes()


@dataclass(eq=False, slots=True)
class Worker:
    """One life of a worker, which is one control stream.

    Attributes:
        disconnect: ends the control stream, with a reason.
        last_progress: time of the last change of `num_steps`.
        measured_at: time of the first report of measured forward times; None: none has come.
        num_steps: step number of the worker's scheduler; -1 before the first heartbeat.
        stats: report of the last heartbeat, with the links that changed since the one before.
        shipped: counters of all links, by receiver and transport.
        links_up: incarnation of each linked decode worker, by id.
        links_down: last report on each decode worker without a link.
        decode_workers: connected and linked decode workers by id; itself in role `both`. Kept by the registry.
        prefixes: reported cached prefixes; empty unless the policy wants them.
        node_store: pages of its host's page store and of others; empty unless the policy wants prefixes.
        load_token_s: reported seconds to load a token from each tier of the store; empty without one.
        num_assigned: running requests by the routers' own counts, fresher than a heartbeat; other routers' are 0.1 s
            old.
        num_pending_tokens: their tokens to prefill, without tokens that an `Estimate` took as cached.
        num_decoding: requests in decode or bound for it.
        num_kv_tokens: tokens of their prompts and earlier outputs.
        num_arriving_tokens: part of these not taken as cached here, of requests without a token from this worker.
        assigned_here, assigned_elsewhere: this router's and the other routers' shares in these five.
        load_number: counter of changes of these, of `lean`, and of reported pool and forward times.
        forward_times: reported times of forward passes.
        rates: this router's measurements of the whole cluster.
        sends, receives: True if it hands over to, or takes over from, other workers.
        page_size: tokens per KV page; equal in a cluster.
        num_starting: this router's requests without a token from the decode worker.
        handing_over: number of these requests whose pages go to another worker, by that worker's id.
        num_suspects: this router's requests that may crash workers (router/attempts.py).
        lean: kind of work that it gets first.
    """

    hello: Hello
    send: Callable[[Sequence[RouterMessage]], None]
    disconnect: Callable[[str], None]
    last_heard: float
    last_progress: float
    last_heartbeat: float = 0.0
    measured_at: float | None = None
    num_steps: int = -1
    stats: WorkerStats = field(default_factory=WorkerStats)
    shipped: dict[tuple[str, str], Shipped] = field(default_factory=dict)
    links_up: dict[str, str] = field(default_factory=dict)
    links_down: dict[str, LinkState] = field(default_factory=dict)
    decode_workers: "dict[str, Worker]" = field(default_factory=dict)
    prefixes: WorkerPrefixes = field(default_factory=WorkerPrefixes)
    node_store: NodeStore = field(default_factory=NodeStore)
    load_token_s: tuple[float, ...] = ()
    num_assigned: int = 0
    num_pending_tokens: int = 0
    num_decoding: int = 0
    num_kv_tokens: int = 0
    num_arriving_tokens: int = 0
    load_number: int = 0
    assigned_here: AssignedLoad = NOTHING
    assigned_elsewhere: AssignedLoad = NOTHING
    num_starting: int = 0
    handing_over: Counter[str] = field(default_factory=Counter)
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
    _num_sent: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.forward_times = start_times(self.hello.device)
        self.rates = ClusterRates(self.hello.device)
        # Copies, because every choice reads them of every worker.
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
        change = AssignedLoad(num_requests, num_pending_tokens, num_decoding, num_kv_tokens, num_arriving_tokens)
        self.assigned_here = self.assigned_here.plus(change)
        self._count_load(change)

    def set_load_elsewhere(self, load: AssignedLoad) -> None:
        if load != self.assigned_elsewhere:
            change = load.minus(self.assigned_elsewhere)
            self.assigned_elsewhere = load
            self._count_load(change)

    def take_stats(self, stats: WorkerStats) -> None:
        old, self.stats = self.stats, stats
        for one in stats.shipped:
            receiver_id, key = one.receiver_id, (one.receiver_id, one.transport)
            # The first heartbeat has the bytes of before.
            if self.num_steps >= 0:
                before = self.shipped[key].num_bytes if key in self.shipped else 0
                self._num_sent[receiver_id] = self._num_sent.get(receiver_id, 0) + one.num_bytes - before
            self.shipped[key] = one
        self.load_token_s = stats.load_token_s
        if stats.forward_times not in (NOT_SAID, self.forward_times):
            self.forward_times = stats.forward_times
            self.load_number += 1
        elif (old.num_leased_pages, old.num_locked_pages) != (stats.num_leased_pages, stats.num_locked_pages):
            self.load_number += 1

    def whole_stats(self, *, by_link: bool) -> WorkerStats:
        """Returns the last report with the counters of all links, or without `by_link` their sums by transport."""
        shipped = self.shipped.values()
        if by_link:
            return replace(self.stats, shipped=tuple(shipped))
        sums = []
        for transport in dict.fromkeys(one.transport for one in shipped):
            own = [(one.num_pages, one.num_bytes, one.copying_ns) for one in shipped if one.transport == transport]
            num_pages, num_bytes, copying_ns = map(sum, zip(*own, strict=True))
            sums.append(Shipped(transport, num_pages, num_bytes, copying_ns=copying_ns))
        return replace(self.stats, shipped=tuple(sums))

    def take_sent_bytes(self) -> dict[str, int]:
        """Returns the bytes sent since the last call, by receiver; idle links are missing."""
        sent, self._num_sent = self._num_sent, {}
        return sent

    def set_lean(self, lean: Lean) -> bool:
        """Returns whether the lean has changed."""
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
        return self.hello.num_pages * self.page_size

    @property
    def max_decoding(self) -> int:
        return self.hello.max_batch_size or ANY_NUMBER

    @property
    def num_held_tokens(self) -> int:
        """Tokens of the pool that no other request can have: locked, leased, or arriving without a lease. A page shared
        by several requests counts once."""
        leased = self.stats.num_leased_pages * self.page_size
        return self.stats.num_locked_pages * self.page_size + max(leased, self.num_arriving_tokens)

    @property
    def max_request_tokens(self) -> int:
        return (self.hello.max_request_pages or self.hello.num_pages) * self.page_size

    @property
    def incarnation(self) -> str:
        return self.hello.incarnation


@dataclass(frozen=True, slots=True)
class Estimate:
    """A policy's expectations of its chosen pair.

    Attributes:
        num_to_compute: prompt tokens not cached at the prefill worker.
        num_to_store: tokens not cached at the decode worker; None: unknown, so all may be.
        num_elsewhere: tokens that at least half of the workers would have to compute; None: unknown.
        reason: reason for this pair, in one of the policy's words; "": none given.
        ttft_s: seconds from the choice to the first token; 0: unknown.
        itl_s: seconds between tokens at the decode worker; 0: unknown.
    """

    num_to_compute: int
    reason: str = ""
    ttft_s: float = 0.0
    itl_s: float = 0.0
    num_to_store: int | None = None
    num_elsewhere: int | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """The workers of one attempt; equal in an aggregated placement."""

    prefill: Worker
    decode: Worker
    estimate: Estimate | None = field(default=None, compare=False)

    @property
    def placement(self) -> Placement:
        return AGGREGATED if self.prefill is self.decode else DISAGGREGATED

    @property
    def distance(self) -> int | None:
        """None for a single worker."""
        return None if self.prefill is self.decode else distance(self.prefill, self.decode)
