"""Every message between router and workers and between linked workers, as plain values.

The schedulers and the tracker know these and never protobuf; tandem.rpc.codec translates. Field names and meanings
are those of proto/tandem/v1/worker.proto and kv_link.proto. Messages of one request carry (request_id, attempt).
"""

from dataclasses import dataclass, field

from tandem.sampling_params import SamplingParams, TokenLogprobs

PROTOCOL_VERSION = 2


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What must be equal at both ends of a link for a page to mean the same thing.

    Attributes:
        model_fingerprint: equal exactly where weights are equal.
        page_bytes: size of one page.
        layout: how these bytes are arranged, as the pool's layout names it.
    """

    model_fingerprint: str
    page_bytes: int
    layout: str


@dataclass(frozen=True, slots=True)
class Shipped:
    """What a worker has sent to others over one transport since its start."""

    transport: str
    num_pages: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Gauges of one worker, and counters since its start.

    Attributes:
        num_queued: requests that wait: for their turn or for pages at prefill, for a lease at decode.
        num_running: requests being computed, and at prefill those waiting to be handed over.
        prompt_tokens_computed, output_tokens_computed: tokens whose KV this worker's forwards have computed.
        prefix_cached_tokens: tokens of prompts that a request found in this worker's cache when it got its pages. Role
            `both` counts them once, at prefill.
        num_given_back: running requests that were given back because there was no page for them to grow into.
        num_leases_expired: granted leases that no prefill worker filled in time.
        shipped: one for each transport that a link from this worker has used.
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
    shipped: tuple[Shipped, ...] = ()


@dataclass(frozen=True, slots=True)
class Moment:
    """A named moment of tandem.lifecycle, in nanoseconds since the epoch."""

    name: str
    time_ns: int


# --- worker to router ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """What a worker is.

    Attributes:
        page_size: tokens of one page.
        metrics_address: where the worker's metrics are served, "host:port"; empty: nowhere.
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


@dataclass(frozen=True, slots=True)
class Heartbeat:
    step: int
    stats: WorkerStats = field(default_factory=WorkerStats)


@dataclass(frozen=True, slots=True)
class LinkState:
    decode_worker_id: str
    decode_incarnation: str
    up: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FirstToken:
    request_id: str
    attempt: int
    index: int
    token_id: int
    finish_reason: str
    cached_len: int
    num_pages_computed: int
    moments: tuple[Moment, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    request_id: str
    attempt: int
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    events: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    request_id: str
    attempt: int
    finish_reason: str
    num_output_tokens: int
    cached_len: int
    num_pages_shipped: int
    moments: tuple[Moment, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    request_id: str
    attempt: int
    reason: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class PrefillDeferred:
    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class GaveBack:
    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class LeaseLost:
    request_id: str
    attempt: int


# --- router to worker ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    router_incarnation: str


@dataclass(frozen=True, slots=True)
class Peer:
    worker_id: str
    incarnation: str
    address: str


@dataclass(frozen=True, slots=True)
class Peers:
    decode_workers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class Admit:
    request_id: str
    attempt: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampling: SamplingParams
    duration_s: float
    arrival_ns: int = 0
    priority: int = 0
    cache_namespace: str = ""


@dataclass(frozen=True, slots=True)
class Prefill:
    request_id: str
    attempt: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampling: SamplingParams
    decode_worker_id: str
    arrival_ns: int = 0
    priority: int = 0
    cache_namespace: str = ""


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str
    attempt: int


# --- prefill worker to decode worker, on their link ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkHello:
    protocol_version: int
    sender_id: str
    sender_incarnation: str
    sender_pid: int
    receiver_incarnation: str
    page_format: PageFormat
    transports: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    lease_id: str
    request_id: str
    attempt: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Committed:
    lease_id: str
    first_token: int
    num_pages: int
    num_tokens: int
    finish_reason: str
    first_token_time_ns: int
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Released:
    """`reported`: the sender tells the router how the attempt ended, so the receiver does not."""

    lease_id: str
    reported: bool = True


@dataclass(frozen=True, slots=True)
class Pushing:
    """Two-sided transports: push `link_seq` carries the `num_pages` pages of the grant from `offset` on."""

    link_seq: int
    lease_id: str
    offset: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Renewed:
    """A chunk has ended: the lease's duration starts again."""

    lease_id: str


# --- decode worker to prefill worker, on their link ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkWelcome:
    """`endpoint`: where the sender finds the receiving end; only that transport understands it."""

    epoch: str
    transport: str
    endpoint: bytes


@dataclass(frozen=True, slots=True)
class LinkRefused:
    """`no_transport`: the receiver has, or can open, none of the offered transports."""

    reason: str
    no_transport: bool = False


@dataclass(frozen=True, slots=True)
class Granted:
    lease_id: str
    cached_len: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    lease_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Revoke:
    lease_id: str


WorkerMessage = (
    Hello | Heartbeat | LinkState | FirstToken | Tokens | Finished | Failed | PrefillDeferred | GaveBack | LeaseLost
)
RouterMessage = Welcome | Peers | Admit | Prefill | Abort
SenderMessage = LinkHello | LeaseRequest | Pushing | Renewed | Committed | Released
ReceiverMessage = LinkWelcome | LinkRefused | Granted | Refused | Revoke
