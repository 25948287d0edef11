"""Messages between router and workers and between linked workers, as plain values.

Schedulers and the request tracker use these classes and never protobuf; tandem.rpc.codec translates them. Field names
and meanings match proto/tandem/v1/worker.proto and kv_link.proto.
"""

from dataclasses import dataclass, field

from tandem.prompt_logprobs import PackedLogprobs
from tandem.sampling_params import SamplingParams, TokenLogprobs

PROTOCOL_VERSION = 6


@dataclass(frozen=True, slots=True)
class PageFormat:
    """Properties that must be equal at both ends of a link before pages may cross it.

    Attributes:
        model_fingerprint: equal if and only if two workers loaded equal weights.
        page_bytes: size of one page.
        layout: the pool layout's tag.
    """

    model_fingerprint: str
    page_bytes: int
    layout: str

    def mismatch(self, other: "PageFormat", own_name: str, other_name: str) -> str:
        """Explain why pages of the two formats cannot be exchanged; "" if they can.

        Args:
            own_name, other_name: the workers' names, for the message.
        """
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
    """Traffic from one worker to another over one transport, since the worker's start.

    Attributes:
        receiver_id: the decode worker.
        copying_ns: time with at least one copy in flight. Bytes over this time are the link's rate, to within the half
            millisecond that noticing a finished copy may take.
    """

    transport: str
    num_pages: int
    num_bytes: int
    receiver_id: str = ""
    copying_ns: int = 0


@dataclass(frozen=True, slots=True)
class ForwardTimes:
    """A worker's forward pass times, in seconds, as a linear function of the batch.

    Attributes:
        prefill_s: constant term of a prefill forward; all fields are 0 until the worker has reported.
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
class WorkerStats:
    """Gauges of one worker, and counters since its start.

    Attributes:
        num_queued: requests waiting for their turn or for pages (prefill), or for a lease (decode).
        num_running: requests being computed; at prefill also those waiting for their handover.
        prompt_tokens_computed, output_tokens_computed: tokens whose KV this worker computed.
        prefix_cached_tokens: prompt tokens found in this worker's cache. Role `both` counts them once, at prefill.
        num_given_back: running requests given back because no page was free.
        num_leases_expired: granted leases that no prefill worker filled in time.
        shipped: one entry per transport and receiver.
        forward_times: the current fit.
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
    forward_times: ForwardTimes = ForwardTimes()


# About ten per request: a frozen dataclass takes three times as long to create.
@dataclass(slots=True)
class Moment:
    """A named moment of tandem.lifecycle, in nanoseconds since the epoch on the worker's clock."""

    name: str
    time_ns: int


# --- worker to router ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker introduces itself.

    Attributes:
        page_size: tokens of one page.
        metrics_address: "host:port" of the worker's metrics; empty if it serves none.
        num_restarts: number of times the cluster has restarted it.
        has_links: role `both` only: the worker hands over to other workers and takes over from them.
        max_request_pages: pages of the largest request it accepts; 0 means its whole pool.
        host: host id (tandem.hosts.host_id), equal for workers of one host.
        rack: equal for hosts of one rack; "" if unknown.
        max_batch_size: maximum requests in a decode step; 0 if unknown.
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


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent at fixed intervals. A `step` that stands still counts as loss, as silence does.

    Attributes:
        step: the scheduler's step count.
    """

    step: int
    stats: WorkerStats = field(default_factory=WorkerStats)


@dataclass(frozen=True, slots=True)
class LinkState:
    """A prefill worker reports that its link to one life of a decode worker opened, ended or cannot be opened.

    It repeats the open links after each Welcome.
    """

    decode_worker_id: str
    decode_incarnation: str
    up: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A prefill worker has sampled the token after a prompt. Sent at once, before the handover.

    Attributes:
        index: the token's index in the whole output, including tokens of earlier attempts.
        cached_len: leading tokens already in the prefill worker's cache.
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


@dataclass(frozen=True, slots=True)
class PromptScored:
    """A prefill worker has scored a chunk of a prompt with log probabilities.

    All chunks arrive, in order, before the attempt's FirstToken.
    """

    request_id: str
    attempt: int
    logprobs: PackedLogprobs


# One per token: a frozen dataclass takes three times as long to create.
@dataclass(slots=True)
class TokenEvent:
    """One request's part of Tokens.

    The first event of an attempt repeats FirstToken's token, because either message may arrive first.
    """

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
    """A decode worker has sent a request's last token. FirstToken replaces it if the first token is the last.

    Attributes:
        num_output_tokens: length of the whole output, over all attempts.
        cached_len: leading tokens already in the decode worker's cache.
        prefill_cached_len: FirstToken's cached_len, because this message may arrive first.
    """

    request_id: str
    attempt: int
    finish_reason: str
    num_output_tokens: int
    cached_len: int
    num_pages_shipped: int
    moments: tuple[Moment, ...] = ()
    prefill_cached_len: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Moments of an attempt under way, so that requests that end early have timings too.

    A prefill worker sends it after the first of several chunks, a decode worker with the second token.
    """

    request_id: str
    attempt: int
    moments: tuple[Moment, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker ends an attempt that it cannot compute or hand over; another attempt may succeed."""

    request_id: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Unservable:
    """A worker ends an attempt whose request no worker can serve."""

    request_id: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class PrefillDeferred:
    """The decode worker had no pages in time for a computed prompt.

    The router ends the attempt without counting a failure; the computed pages stay cached.
    """

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class GaveBack:
    """A decode worker that ran out of pages ends the attempt that is cheapest to redo.

    The router restarts the request with the tokens so far, without counting a failure.
    """

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """A decode worker ends an attempt whose pages did not all arrive.

    The lease expired, the link ended, or the prefill worker released the lease without telling the router.
    """

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Recalled:
    """A worker's answer to Recall: its record of the request.

    Attributes:
        attempt: the last attempt that the worker took part in.
        token_ids: the whole output so far, over all attempts.
        resume_token: the token the router stored with the record; empty if there is no record.
    """

    recall_id: str
    attempt: int = 0
    token_ids: tuple[int, ...] = ()
    resume_token: bytes = b""


@dataclass(frozen=True, slots=True)
class ClockReply:
    """A worker's answer to ClockProbe. Times are tandem.lifecycle.now_ns, in nanoseconds.

    Attributes:
        sent_ns: the probe's send time, on the router's clock.
        received_ns, replied_ns: arrival of the probe and departure of the reply, on the worker's clock.
    """

    sent_ns: int
    received_ns: int
    replied_ns: int


@dataclass(frozen=True, slots=True)
class CachedPrefixes:
    """A worker reports its cached prefixes by identity (tandem.prefix), packed, at its own page size.

    A router that asked for them gets the whole set first, in a few messages, and then the changes.

    Attributes:
        number: increases by one with each message on a stream.
        is_whole: discard everything reported before.
        stored, removed: identities of the pages added and removed.
    """

    number: int
    is_whole: bool
    stored: bytes
    removed: bytes = b""


# --- router to worker ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """The router accepts a worker: its answer to Hello and the first message on the stream.

    Attributes:
        wants_prefixes: whether the worker should report its cached prefixes.
    """

    router_incarnation: str
    wants_prefixes: bool = False


@dataclass(frozen=True, slots=True)
class Peer:
    """A decode worker to link to. A restarted worker is a new peer."""

    worker_id: str
    incarnation: str
    address: str


@dataclass(frozen=True, slots=True)
class Peers:
    """The decode workers that prefill workers keep links to, sent whenever a worker joins or is lost."""

    decode_workers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class Admit:
    """The router announces an attempt to its decode worker.

    Attributes:
        output_ids: tokens of earlier attempts.
        duration_s: how long the worker remembers the attempt while no lease is granted.
        record_id: name of the record that outlives the request; empty if none is needed.
        resume_token: stored with the record; opaque to workers.
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


@dataclass(frozen=True, slots=True)
class Prefill:
    """The router has a prefill worker compute a prompt and hand it over to `decode_worker_id`.

    The other fields are those of Admit.
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


@dataclass(frozen=True, slots=True)
class ClockProbe:
    """A router asks for a worker's clock at `sent_ns` of its own (tandem.lifecycle.now_ns). Answered at once."""

    sent_ns: int


@dataclass(frozen=True, slots=True)
class Abort:
    """The router ends an attempt: the client left, a stop string matched, or the attempt ended early.

    A worker ignores it for an attempt that it does not know.
    """

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Recall:
    """A router asks for a worker's record of a request, possibly another router's. Always answered."""

    recall_id: str
    record_id: str


@dataclass(frozen=True, slots=True)
class RepeatPrefixes:
    """A router that missed a CachedPrefixes asks for the whole set again."""


@dataclass(frozen=True, slots=True)
class ResetCache:
    """The router has a worker drop its cached prefixes, except pages in use."""


# --- prefill worker to decode worker, on their link ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkHello:
    """A prefill worker opens an epoch.

    The decode worker refuses it if version, incarnation or page format differ, or if it can open no offered transport.

    Attributes:
        sender_host: the sender's host (tandem.hosts.host_id); a process id is only meaningful there.
    """

    protocol_version: int
    sender_id: str
    sender_incarnation: str
    sender_pid: int
    receiver_incarnation: str
    page_format: PageFormat
    transports: tuple[str, ...]
    sender_host: str = ""


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """The sender asks for pages for `num_tokens` tokens, before it computes the first chunk."""

    lease_id: str
    request_id: str
    attempt: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The sender settles a granted lease: all copies are done, and the decode worker takes the request over.

    Attributes:
        ship_started_ns: time of the first push, on the sender's clock; 0 if no page was pushed.
        prefill_cached_len: leading tokens already in the sender's cache.
    """

    lease_id: str
    first_token: int
    num_pages: int
    num_tokens: int
    finish_reason: str
    ship_started_ns: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    prefill_cached_len: int = 0


@dataclass(frozen=True, slots=True)
class Released:
    """The sender gives up a lease, granted or not. This settles it; none of its copies is running.

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
    """The receiver accepts the link: the epoch is open.

    Attributes:
        transport: the receiver's choice among the offered transports.
        endpoint: address of the receiving end, opaque to all but the transport.
        passed_over: "name: reason" for each offered transport that was skipped.
    """

    epoch: str
    transport: str
    endpoint: bytes
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkRefused:
    """The receiver refuses the link.

    Attributes:
        no_transport: it has, or can open, none of the offered transports.
    """

    reason: str
    no_transport: bool = False


@dataclass(frozen=True, slots=True)
class Granted:
    """The receiver promises pages for a lease.

    Attributes:
        cached_len: leading tokens that the receiver already has.
        page_ids: destinations of the remaining pages, which the sender fills before it settles the lease.
    """

    lease_id: str
    cached_len: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The receiver grants no pages for a lease, which settles it.

    Attributes:
        reason: "gone": the attempt has ended; "too_large": it exceeds the pool; "unknown": no Admit of this attempt and
            length has arrived; "full": too many leases are waiting, so ask again later.
    """

    lease_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Revoke:
    """The receiver asks for a granted lease back: it expired, or the attempt has ended.

    The sender's answer settles it; until then the pages stay leased.
    """

    lease_id: str


WorkerMessage = (
    Hello
    | Heartbeat
    | LinkState
    | PromptScored
    | FirstToken
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
)
RouterMessage = Welcome | Peers | Admit | Prefill | Abort | Recall | ResetCache | RepeatPrefixes | ClockProbe
SenderMessage = LinkHello | LeaseRequest | Pushing | Renewed | Committed | Released
ReceiverMessage = LinkWelcome | LinkRefused | Granted | Refused | Revoke
