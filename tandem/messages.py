"""Messages between router and workers and between linked workers, as plain values.

Schedulers and routers use these classes; tandem.rpc.codec translates them to the protobuf messages of the same names.
"""

from dataclasses import dataclass, field

from tandem.adapters import AdapterEntry, AdapterRef
from tandem.embedding import EmbeddingParams
from tandem.head_slice import HeadSlice
from tandem.prompt_logprobs import PackedLogprobs
from tandem.sampling_params import SamplingParams, TokenLogprobs

PROTOCOL_VERSION = 10


@dataclass(frozen=True, slots=True)
class PageFormat:
    """Properties that both ends of a link must share to exchange pages: equal weights, page size and pool layout."""

    model_fingerprint: str
    page_bytes: int
    layout: str

    def mismatch(self, other: "PageFormat", own_name: str, other_name: str) -> str:
        """Explain why pages of the two formats cannot be exchanged; "" if they can."""
        if self.model_fingerprint != other.model_fingerprint:
            return (
                f"models differ: {own_name} has loaded {self.model_fingerprint}, {other_name} "
                f"{other.model_fingerprint}; if the model's files were replaced, restart the whole cluster"
            )
        if self != other:
            return (
                f"pages differ: {self.layout} of {self.page_bytes} bytes at {own_name}, {other.layout} of "
                f"{other.page_bytes} at {other_name}; give both the same --dtype, --kv-cache-dtype and --page-size"
            )
        return ""


@dataclass(frozen=True, slots=True)
class Shipped:
    """Traffic to one worker over one transport, since the sender's start.

    Attributes:
        copying_ns: time with a copy in flight, within the half millisecond that noticing its end may take.
    """

    transport: str
    num_pages: int
    num_bytes: int
    receiver_id: str = ""
    copying_ns: int = 0


@dataclass(frozen=True, slots=True)
class ForwardTimes:
    """A worker's forward times in seconds, linear in the batch. All 0 until the worker has reported.

    Attributes:
        prefill_s: constant term of a prefill forward.
        prompt_token_s: per prompt token.
        attended_token_s: per attended token; n prompt tokens behind m cached ones attend to n * m + n * n / 2.
        step_s, request_s, kv_token_s: per decode step, per request in it, per token of KV it attends to.
        gap_beside_prompts_s: mean time between decode steps while prompts are computed too; 0 if unknown.
    """

    prefill_s: float = 0.0
    prompt_token_s: float = 0.0
    attended_token_s: float = 0.0
    step_s: float = 0.0
    request_s: float = 0.0
    kv_token_s: float = 0.0
    gap_beside_prompts_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TierHits:
    """Tokens that a request's prefetch loaded into the pool, by the tier that held them, in the order of loading."""

    host: int = 0
    disk: int = 0
    peer: int = 0

    @property
    def total(self) -> int:
        return self.host + self.disk + self.peer

    def counts(self) -> dict[str, int]:
        """Returns the counts by their names in usage and logs; none at all without a hit."""
        if not self.total:
            return {}
        return {"host_tokens": self.host, "disk_tokens": self.disk, "peer_tokens": self.peer}

    def among(self, num_cached: int) -> dict[str, int]:
        """Returns all cached tokens by the tier that held them. Those that no prefetch loaded were in the pool."""
        return {"pool": num_cached - self.total, "host": self.host, "disk": self.disk, "peer": self.peer}

    def plus(self, other: "TierHits") -> "TierHits":
        return TierHits(self.host + other.host, self.disk + other.disk, self.peer + other.peer)

    def within(self, num_tokens: int) -> "TierHits":
        """Returns the first `num_tokens` of these hits."""
        host = min(self.host, num_tokens)
        disk = min(self.disk, num_tokens - host)
        return TierHits(host, disk, min(self.peer, num_tokens - host - disk))

    def in_prompt(self, cached_len: int, prompt_len: int) -> "TierHits":
        """Returns the hits among the prompt's tokens. They are the last tokens of the `cached_len` cached ones."""
        return self.within(max(0, prompt_len - (cached_len - self.total)))


NO_HITS = TierHits()


# Longer accepted lengths count as this one.
MAX_COUNTED_LENGTH = 7


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafts of one source since the worker's start.

    Attributes:
        num_proposals: each the drafts of one request in one step.
        num_tokens, num_accepted: drafts in them, and those that the sampler chose too.
        num_by_length: checked proposals by their number of accepted drafts, from 0 to MAX_COUNTED_LENGTH.
    """

    source: str
    num_proposals: int
    num_tokens: int
    num_accepted: int
    num_by_length: tuple[int, ...] = (0,) * (MAX_COUNTED_LENGTH + 1)


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Gauges of one worker, and counters since its start.

    Attributes:
        num_queued: requests waiting for their turn or for pages (prefill), or for a lease (decode).
        num_running: requests being computed; at prefill also those waiting for their handover.
        prompt_tokens_computed, output_tokens_computed: tokens whose KV this worker computed.
        prefix_cached_tokens: prompt tokens found in this worker's cache. Role `both` counts them once, at prefill.
        num_queued_tokens: prompt tokens of the requests waiting for prefill, and the tokens to compute of started ones.
        prefix_host_tokens, prefix_disk_tokens, prefix_peer_tokens: those among them that the page store held in its
            memory, on its disk, or on another node; the others were in the pool.
        num_given_back: running requests given back for lack of pages.
        num_leases_expired: granted leases that no prefill worker filled in time.
        num_adapters_on_device, num_adapters_in_host: LoRA adapters by place.
        num_adapter_loads, adapter_load_ns: measured loads of adapters, and their time.
        load_token_s: seconds to load a token's KV from each tier of the page store (tandem.pagestore.messages), assumed
            before the first measurement; 0.0 for a tier that it lacks; empty without a store.
        drafted: by source; empty without speculation.
    """

    num_queued: int = 0
    num_running: int = 0
    num_total_pages: int = 0
    num_free_pages: int = 0
    num_cached_pages: int = 0
    num_locked_pages: int = 0
    num_leased_pages: int = 0
    prompt_tokens_computed: int = 0
    output_tokens_computed: int = 0
    prefix_cached_tokens: int = 0
    num_given_back: int = 0
    num_leases_expired: int = 0
    prefix_host_tokens: int = 0
    prefix_disk_tokens: int = 0
    prefix_peer_tokens: int = 0
    num_queued_tokens: int = 0
    num_adapters_on_device: int = 0
    num_adapters_in_host: int = 0
    num_adapter_loads: int = 0
    adapter_load_ns: int = 0
    shipped: tuple[Shipped, ...] = ()
    forward_times: ForwardTimes = ForwardTimes()
    load_token_s: tuple[float, ...] = ()
    drafted: tuple[Drafted, ...] = ()

    @property
    def prefix_loaded(self) -> TierHits:
        return TierHits(self.prefix_host_tokens, self.prefix_disk_tokens, self.prefix_peer_tokens)


# About ten per request: a frozen dataclass takes three times as long to create.
@dataclass(slots=True)
class Moment:
    """A moment of tandem.lifecycle, in nanoseconds since the epoch on the worker's clock."""

    name: str
    time_ns: int


# --- worker to router ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker introduces itself.

    Attributes:
        metrics_address: "" if it serves no metrics.
        has_links: role `both` only: it is linked to other workers.
        max_request_pages: largest accepted request; 0 means the whole pool.
        host: tandem.hosts.host_id.
        rack: equal for hosts of one rack; "" if unknown.
        max_batch_size: maximum requests in a decode step; 0 if unknown.
        start_s: time that the worker took to load; 0 if unknown.
        follower_pids: of its ranks after the first, whose pid is `pid`.
    """

    protocol_version: int
    worker_id: str
    incarnation: str
    role: str
    device: str
    address: str
    pid: int
    page_format: PageFormat
    num_pages: int
    page_size: int
    metrics_address: str = ""
    num_restarts: int = 0
    has_links: bool = False
    max_request_pages: int = 0
    host: str = ""
    rack: str = ""
    max_batch_size: int = 0
    start_s: float = 0.0
    follower_pids: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        return 1 + len(self.follower_pids)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent at fixed intervals. A `step` that stands still counts as loss, like silence."""

    step: int
    stats: WorkerStats = field(default_factory=WorkerStats)


@dataclass(frozen=True, slots=True)
class LinkState:
    """A link to a decode worker's incarnation opened, ended or failed. Repeats open links after each Welcome."""

    decode_worker_id: str
    decode_incarnation: str
    up: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The token after a prompt is sampled. Sent before the handover.

    Attributes:
        index: position in the whole output, including earlier attempts.
        cached_len: leading tokens already in the prefill worker's cache.
        loaded: those among them that a prefetch loaded.
    """

    request_id: str
    attempt: int
    index: int
    token_id: int
    finish_reason: str
    cached_len: int
    num_pages_computed: int
    moments: tuple[Moment, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    loaded: TierHits = NO_HITS


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log probabilities of a prompt's chunk. All chunks precede FirstToken, in order."""

    request_id: str
    attempt: int
    logprobs: PackedLogprobs


@dataclass(frozen=True, slots=True)
class Embedded:
    """Ends an attempt whose prompt is only embedded. The worker has freed its pages.

    Attributes:
        values: float32, little-endian.
        cached_len: leading tokens already in the worker's cache.
        loaded: those among them that a prefetch loaded.
    """

    request_id: str
    attempt: int
    values: bytes
    cached_len: int
    num_pages_computed: int
    moments: tuple[Moment, ...] = ()
    loaded: TierHits = NO_HITS


# One per token: a frozen dataclass takes three times as long to create.
@dataclass(slots=True)
class TokenEvent:
    """One request's part of Tokens. The first repeats FirstToken's token, because either message may arrive first."""

    request_id: str
    attempt: int
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """A decode step's new tokens, for all of its requests."""

    events: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The last token of a request is sent. FirstToken replaces it if the first token is the last.

    Attributes:
        num_output_tokens: length of the whole output, over all attempts.
        cached_len: leading tokens already in the decode worker's cache.
        prefill_cached_len, prefill_loaded: FirstToken's cached_len and loaded, because this message may arrive first.
        num_drafted, num_accepted: drafts of this attempt, in tokens, and those that the sampler chose too.
    """

    request_id: str
    attempt: int
    finish_reason: str
    num_output_tokens: int
    cached_len: int
    num_pages_shipped: int
    moments: tuple[Moment, ...] = ()
    prefill_cached_len: int = 0
    prefill_loaded: TierHits = NO_HITS
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Moments of a running attempt, so that requests that end early have timings.

    Sent after the first of several chunks (prefill) and with the second token (decode).
    """

    request_id: str
    attempt: int
    moments: tuple[Moment, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """Ends an attempt that the worker cannot compute or hand over; another attempt may succeed."""

    request_id: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Unservable:
    """Ends an attempt whose request no worker can serve."""

    request_id: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class PrefillDeferred:
    """The decode worker had no pages in time. The computed pages stay cached.

    The router ends the attempt without counting a failure.
    """

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class GaveBack:
    """Ends the attempt that is cheapest to redo, when a decode worker has no free page, or one that moves.

    The router restarts the request with its tokens so far, without counting a failure.

    Attributes:
        is_move: the pages of an ordered Move are at the other worker.
    """

    request_id: str
    attempt: int
    is_move: bool = False


# Reasons of NotMoved: the first request of its worker stays; the attempt has ended; no link; the lease was not granted
# at once; the grammar is not compiled there, or the adapter not loaded; the pages find no room here; the output outgrew
# the lease; the copy was lost, or took too long.
MOVE_REFUSALS = ("oldest", "ended", "no_link", "busy", "grammar", "adapter", "no_room", "outgrown", "lost", "late")


@dataclass(frozen=True, slots=True)
class NotMoved:
    """Answers Move: the stream goes on at its worker.

    Attributes:
        reason: one of MOVE_REFUSALS.
    """

    request_id: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """Ends an attempt whose pages did not all arrive at the decode worker.

    The lease expired, the link ended, or the prefill worker released it without telling the router.
    """

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Recalled:
    """
    Attributes:
        attempt: the worker's last attempt.
        token_ids: the whole output so far, over all attempts.
        resume_token: stored with the record; empty without a record.
    """

    recall_id: str
    attempt: int = 0
    token_ids: tuple[int, ...] = ()
    resume_token: bytes = b""


@dataclass(frozen=True, slots=True)
class AdapterChecked:
    """Answers CheckAdapter.

    Attributes:
        adapter: None if it cannot be served.
        refusal: the reason, in one line; "" with an adapter.
    """

    check_id: str
    adapter: AdapterRef | None
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class AdapterPlaces:
    """Adapters that a worker has, by content hash; sent when they change.

    Attributes:
        load_byte_s: seconds to load a byte of an adapter that is not in memory, as measured; 0.0: not yet.
    """

    on_device: tuple[str, ...]
    in_host: tuple[str, ...]
    load_byte_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Adapters:
    """Entries of the sender's book of adapters: all of them first, changes later. Sent both ways, because a router that
    was away learns from workers."""

    entries: tuple[AdapterEntry, ...]


@dataclass(frozen=True, slots=True)
class ClockReply:
    """Attributes: received_ns, replied_ns: on the worker's clock."""

    sent_ns: int
    received_ns: int
    replied_ns: int


@dataclass(frozen=True, slots=True)
class CachedPrefixes:
    """A worker reports its cached prefixes, or a page store its pages, by packed identities (tandem.prefix).

    The whole set comes first, in parts; changes may come between these.

    Attributes:
        number: increases by one with each message on a stream.
        is_whole: discard everything reported before, of all tiers.
        tier: of a store (tandem.pagestore.messages); 0 from a worker.
    """

    number: int
    is_whole: bool
    stored: bytes
    removed: bytes = b""
    tier: int = 0


# --- page store to router --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreJoin:
    """A page store introduces itself.

    Attributes:
        incarnation: random name of this life of the store.
        host: tandem.hosts.host_id, equal to that of the workers it serves.
        rack: equal for hosts of one rack; "" if unknown.
        address: its gRPC server's; "" if it serves no peers.
        metrics_address: "" if it serves no metrics.
    """

    protocol_version: int
    store_id: str
    incarnation: str
    host: str
    rack: str = ""
    address: str = ""
    pid: int = 0
    metrics_address: str = ""


@dataclass(frozen=True, slots=True)
class StoreBeat:
    """A sign of life.

    Attributes:
        num_slots: pages that its memory holds at most.
        num_host_pages, num_disk_pages: pages in memory and on disk; a page may be in both.
        num_disk_bytes: size of its files.
        is_disk_off: a failure has turned the disk off, until the store restarts.
    """

    num_slots: int = 0
    num_host_pages: int = 0
    num_disk_pages: int = 0
    num_disk_bytes: int = 0
    is_disk_off: bool = False


@dataclass(frozen=True, slots=True)
class CacheWasReset:
    """Answers ResetCache.

    Attributes:
        number: ResetCache.number.
        failure: why a later life of the store may find pages of before; "": none can.
    """

    number: int
    failure: str = ""


# --- router to worker ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """Accepts a worker, first on the stream. Attributes: wants_prefixes: asks for CachedPrefixes."""

    router_incarnation: str
    wants_prefixes: bool = False


@dataclass(frozen=True, slots=True)
class Peer:
    """Attributes: worker_id: name of a worker, or of a page store."""

    worker_id: str
    incarnation: str
    address: str


@dataclass(frozen=True, slots=True)
class Peers:
    """All decode workers to link to, or to a page store all others; sent whenever one joins or is lost."""

    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class Admit:
    """Announces an attempt to its decode worker.

    Attributes:
        output_ids: tokens of earlier attempts.
        duration_s: lifetime without a granted lease.
        record_id: name of the record that outlives the request; "" for none.
        resume_token: stored with the record; opaque to workers.
        client: digest of the client whose turn it is to have a grammar compiled; "" without a grammar.
        prefill_worker_id: worker that computes the prompt; "" if unknown.
        copy_of: request whose pages go ahead of its move under this id; "" for none. Their lease is granted at once or
            refused, and no token follows.
        adapter: LoRA adapter of the request; None: the base model. Its hash is part of cache_namespace
            (tandem.prefix.adapted_namespace).
    """

    request_id: str
    attempt: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampling: SamplingParams
    duration_s: float
    arrival_ns: int = 0
    priority: int = 0
    cache_namespace: str = ""
    record_id: str = ""
    resume_token: bytes = b""
    client: str = ""
    prefill_worker_id: str = ""
    copy_of: str = ""
    adapter: AdapterRef | None = None


@dataclass(frozen=True, slots=True)
class Prefill:
    """Has a worker compute a prompt and hand it over. Other fields: see Admit.

    Attributes:
        embedding: answer with Embedded instead of a first token and a handover. Then decode_worker_id is "".
        is_move: goes on with a stream that this worker gave back for a move: before all queued prompts.
    """

    request_id: str
    attempt: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampling: SamplingParams
    decode_worker_id: str
    arrival_ns: int = 0
    priority: int = 0
    cache_namespace: str = ""
    record_id: str = ""
    resume_token: bytes = b""
    embedding: EmbeddingParams | None = None
    client: str = ""
    is_move: bool = False
    adapter: AdapterRef | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """Has a worker send a running stream's pages ahead, and give the stream back once they are there.

    Attributes:
        copy_id: id under which the other worker has admitted the pages.
        num_tokens: leading tokens whose pages go ahead, a multiple of the page size.
    """

    request_id: str
    attempt: int
    copy_id: str
    decode_worker_id: str
    num_tokens: int
    cache_namespace: str = ""


@dataclass(frozen=True, slots=True)
class ClockProbe:
    """Attributes: sent_ns: on the router's clock (tandem.lifecycle.now_ns)."""

    sent_ns: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends an attempt, e.g. because the client left. Workers ignore unknown attempts."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class CheckAdapter:
    """Asks whether the adapter of a directory can be served. Always answered."""

    check_id: str
    path: str


@dataclass(frozen=True, slots=True)
class Recall:
    """Asks for a worker's record of a request, possibly another router's. Always answered."""

    recall_id: str
    record_id: str


@dataclass(frozen=True, slots=True)
class NamespaceOwners:
    """Names the API keys by the owners of their cache namespaces (tandem.prefix.owner_of), after Welcome and whenever
    they change. Sent only with --speculation-shared: drafts come from the outputs of these owners' namespaces."""

    owners: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RepeatPrefixes:
    """Asks for the whole set again, after a missed CachedPrefixes."""


@dataclass(frozen=True, slots=True)
class ResetCache:
    """Drop all cached prefixes, except pages in use; to a page store: all pages.

    Attributes:
        number: counts up with the resets of a router. A page store answers with it, and gets the message again until
            it has purged for good.
    """

    number: int = 0


# --- prefill worker to decode worker, on their link ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkRank:
    """One process of a linked worker.

    Attributes:
        gpu: PCI id; "" on a CPU.
        heads: KV heads in its pages.
    """

    pid: int
    gpu: str
    heads: HeadSlice


@dataclass(frozen=True, slots=True)
class LinkHello:
    """Opens an epoch.

    Refused if version, incarnation or page format differ, if the ranks' heads do not fit, or if the receiver can open
    no offered transport.

    Attributes:
        page_format: of pages with all heads.
        ranks: the sender's processes.
        sender_host: tandem.hosts.host_id; ids of processes and GPUs are meaningful only there.
    """

    protocol_version: int
    sender_id: str
    sender_incarnation: str
    receiver_incarnation: str
    page_format: PageFormat
    transports: tuple[str, ...]
    ranks: tuple[LinkRank, ...]
    sender_host: str = ""


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """Asks for pages, before the first chunk is computed."""

    lease_id: str
    request_id: str
    attempt: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Settles a granted lease: all copies are done, and the decode worker takes over.

    Attributes:
        ship_started_ns: time of the first push, on the sender's clock; 0 without pushes.
        prefill_cached_len: leading tokens already in the sender's cache.
        prefill_loaded: those among them that a prefetch loaded.
    """

    lease_id: str
    first_token: int
    num_pages: int
    num_tokens: int
    finish_reason: str
    ship_started_ns: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    prefill_cached_len: int = 0
    prefill_loaded: TierHits = NO_HITS


@dataclass(frozen=True, slots=True)
class Released:
    """Gives up a lease, granted or not, with no copies running. This settles the lease.

    Attributes:
        reported: the sender reports the attempt's end to the router, so the receiver does not.
    """

    lease_id: str
    reported: bool = True


@dataclass(frozen=True, slots=True)
class Pushing:
    """For two-sided transports: push `link_seq` carries `num_pages` pages of the grant, starting at `offset`."""

    link_seq: int
    lease_id: str
    offset: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Renewed:
    """A chunk has ended: restart the lease's duration."""

    lease_id: str


# --- decode worker to prefill worker, on their link ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkWelcome:
    """Opens the epoch.

    Attributes:
        heads: KV heads in the pages of each of the receiver's ranks.
        endpoints: address of each lane's receiving end, opaque to all but the transport.
        passed_over: "name: reason" for each skipped transport of the offer.
    """

    epoch: str
    transport: str
    heads: tuple[HeadSlice, ...]
    endpoints: tuple[bytes, ...]
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkRefused:
    """Attributes: no_transport: the receiver can open none of the offered transports."""

    reason: str
    no_transport: bool = False


@dataclass(frozen=True, slots=True)
class Granted:
    """Promises pages for a lease.

    Attributes:
        cached_len: leading tokens that the receiver already has.
        page_ids: destinations of the remaining pages.
    """

    lease_id: str
    cached_len: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """Settles a lease without pages.

    Attributes:
        reason: "gone": the attempt has ended; "too_large": it exceeds the pool; "unknown": no Admit of this attempt and
            length has arrived; "full": too many leases are waiting, so ask again later. Of pages that go ahead of a
            move: "busy": they would have to wait; "grammar": the request's grammar is not compiled; "adapter": its
            adapter is not loaded.
    """

    lease_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Revoke:
    """Asks for a granted lease back: it expired, or the attempt has ended.

    The pages stay leased until the sender settles the lease.
    """

    lease_id: str


WorkerMessage = (
    Hello
    | Heartbeat
    | LinkState
    | PromptScored
    | FirstToken
    | Embedded
    | Tokens
    | Finished
    | Failed
    | Unservable
    | PrefillDeferred
    | GaveBack
    | LeaseLost
    | Recalled
    | ClockReply
    | Progress
    | CachedPrefixes
    | NotMoved
    | AdapterChecked
    | AdapterPlaces
    | Adapters
)
StoreReport = StoreJoin | StoreBeat | CachedPrefixes | CacheWasReset
RouterMessage = (
    Welcome
    | Peers
    | Admit
    | Prefill
    | Move
    | Abort
    | Recall
    | ResetCache
    | RepeatPrefixes
    | ClockProbe
    | CheckAdapter
    | Adapters
    | NamespaceOwners
)
SenderMessage = LinkHello | LeaseRequest | Pushing | Renewed | Committed | Released
ReceiverMessage = LinkWelcome | LinkRefused | Granted | Refused | Revoke
