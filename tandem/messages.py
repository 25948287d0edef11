"""Every message between router and workers and between linked workers, as plain values.

The schedulers and the tracker know these and never protobuf; tandem.rpc.codec translates. Field names and meanings
are those of tandem/v1/worker.proto and kv_link.proto. Messages of one request carry (request_id, attempt).
"""

from dataclasses import dataclass, field

from tandem.prompt_logprobs import PackedLogprobs
from tandem.sampling_params import SamplingParams, TokenLogprobs

PROTOCOL_VERSION = 6


@dataclass(frozen=True, slots=True)
class PageFormat:
    """What must be equal at both ends of a link for a page to mean the same thing.

    Attributes:
        model_fingerprint: equal exactly where workers have loaded equal weights.
        page_bytes: size of one page.
        layout: how these bytes are arranged, as the pool's layout names it.
    """

    model_fingerprint: str
    page_bytes: int
    layout: str

    def mismatch(self, other: "PageFormat", own_name: str, other_name: str) -> str:
        """Why pages of the two cannot be mixed, or "". Args: own_name, other_name: whose they are."""
        if self.model_fingerprint != other.model_fingerprint:
            return (
                f"models differ: {own_name} has loaded {self.model_fingerprint}, {other_name} "
                f"{other.model_fingerprint}; if the model's files were replaced, start the whole cluster again"
            )
        if self != other:
            return (
                f"pages differ: {self.layout} of {self.page_bytes} bytes at {own_name}, {other.layout} of "
                f"{other.page_bytes} at {other_name}; give both the same --dtype, --kv-cache-dtype and --page-size"
            )
        return ""


@dataclass(frozen=True, slots=True)
class Shipped:
    """What a worker has sent to one other over one transport since its start.

    Attributes:
        receiver_id: the decode worker at the other end.
        copying_ns: how long at least one copy was under way. The bytes over this time are the link's rate as seen from
            its worker, which notices the end of a copy within half a millisecond.
    """

    transport: str
    num_pages: int
    num_bytes: int
    receiver_id: str = ""
    copying_ns: int = 0


@dataclass(frozen=True, slots=True)
class ForwardTimes:
    """How long a worker's forwards take: seconds as a linear function of what is in them.

    Attributes:
        prefill_s: of a forward of prompts, whatever is in it; all 0 of a worker that has not said anything yet.
        prompt_token_s: of each prompt token in it.
        attended_token_s: of each token that one of these attends to: a prompt of n tokens behind m cached ones attends
            to n * m + n * n / 2.
        step_s, request_s, kv_token_s: of a decode step, of each request in it, and of each token that these attend to.
        gap_beside_prompts_s: mean time between two decode steps while prompts were computed too; 0: not known.
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
        num_queued: requests that wait: for their turn or for pages at prefill, for a lease at decode.
        num_running: requests being computed, and at prefill those waiting to be handed over.
        prompt_tokens_computed, output_tokens_computed: tokens whose KV this worker's forwards have computed.
        prefix_cached_tokens: tokens of prompts that a request found in this worker's cache when it got its pages. Role
            `both` counts them once, at prefill.
        num_given_back: running requests that were given back because there was no page for them to grow into.
        num_leases_expired: granted leases that no prefill worker filled in time.
        shipped: one for each transport that links from this worker to each other one have used.
        forward_times: as it has seen them lately.
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


# There are about ten for each request, and frozen ones would take three times as long to make.
@dataclass(slots=True)
class Moment:
    """A named moment of tandem.lifecycle, in nanoseconds since the epoch on the clock of the worker where it was."""

    name: str
    time_ns: int


# --- worker to router ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """What a worker is.

    Attributes:
        page_size: tokens of one page.
        metrics_address: where the worker's metrics are served, "host:port"; empty: nowhere.
        num_restarts: how often the cluster has started it again.
        has_links: whether it hands over to other workers and takes over from them, in role `both`. Those of role
            `prefill` and `decode` do the one or the other.
        max_request_pages: of the largest request that it takes; 0: one that fills its pool.
        host: the same for workers of one host (tandem.hosts.host_id).
        rack: the same for hosts of one rack; "": nobody has said.
        max_batch_size: requests in one of its decode steps at most; 0: it has not said.
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
    """A worker sends it at fixed intervals to show that it lives. `step` counts the steps of its scheduler: a count
    that stands still means loss, as silence does."""

    step: int
    stats: WorkerStats = field(default_factory=WorkerStats)


@dataclass(frozen=True, slots=True)
class LinkState:
    """A prefill worker says that its link to one life of a decode worker has opened, has ended, or cannot be opened.
    After each Welcome it says again which links are up."""

    decode_worker_id: str
    decode_incarnation: str
    up: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A prefill worker has computed a prompt and sampled the token after it. It says so at once, before the pages are
    handed over.

    Attributes:
        index: the token's in the whole output, which earlier attempts may have begun.
        cached_len: leading tokens whose KV the prefill worker had before the request.
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
    """A prefill worker has computed a chunk of a prompt whose log probabilities are asked for. All of them come, in
    order, before the attempt's FirstToken."""

    request_id: str
    attempt: int
    logprobs: PackedLogprobs


# There is one for each token, and a frozen one would take three times as long to make.
@dataclass(slots=True)
class TokenEvent:
    """One request's part of Tokens. The first one of an attempt begins with the token that FirstToken brings too,
    because either may be heard first."""

    request_id: str
    attempt: int
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """A decode worker sends it after each step, with the new tokens of all requests that were in the step."""

    events: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """A decode worker has computed a request's last token, which it has sent before. Nobody sends this for a request
    that its first token ends: FirstToken says so.

    Attributes:
        num_output_tokens: of the whole output, over all attempts.
        cached_len: leading tokens whose KV the decode worker had before the request.
        prefill_cached_len: FirstToken's cached_len, for this may be heard before it.
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
    """A worker says how far an attempt has come, so that it is known of requests that end early too: a prefill worker
    after a prompt's first chunk if there are more, a decode worker with the second token."""

    request_id: str
    attempt: int
    moments: tuple[Moment, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker cannot compute an attempt, or cannot hand it over, and ends it; another attempt may go well."""

    request_id: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Unservable:
    """A worker ends an attempt because nobody can serve its request: no other attempt would go any better."""

    request_id: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class PrefillDeferred:
    """A prefill worker has computed a prompt, but the decode worker had no pages for it in time. The router ends the
    attempt, as nobody's failure; what was computed stays cached."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class GaveBack:
    """A decode worker has run out of pages and ends the attempt that is cheapest to redo, as nobody's failure: the
    router starts the request again with the tokens so far."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """A decode worker ends an attempt whose pages did not all come: the time for it was over, the link ended, or the
    prefill worker gave the lease up without a word to the router."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Recalled:
    """A worker's answer to Recall: what it has kept of the request, as far as it has served it.

    Attributes:
        attempt: the last one that it had a part in.
        token_ids: of the whole output up to there, over all attempts.
        resume_token: what the router gave it to keep; empty: it has no such record.
    """

    recall_id: str
    attempt: int = 0
    token_ids: tuple[int, ...] = ()
    resume_token: bytes = b""


@dataclass(frozen=True, slots=True)
class ClockReply:
    """A worker's answer to ClockProbe. All times are those of tandem.lifecycle.now_ns, in nanoseconds.

    Attributes:
        sent_ns: the probe's, on the router's clock.
        received_ns, replied_ns: when the probe came and this answer went, on the worker's clock.
    """

    sent_ns: int
    received_ns: int
    replied_ns: int


@dataclass(frozen=True, slots=True)
class CachedPrefixes:
    """A worker says which prefixes it has cached, by their identities (tandem.prefix) at its own page size, packed. To
    a router that wants to know it first says all that it has, in a few messages one after the other, and from then on
    what has changed.

    Attributes:
        number: one more than that of the message before on this stream.
        is_whole: what was said before does not hold any more.
        stored, removed: of pages that it has now, and of those that it has no more.
    """

    number: int
    is_whole: bool
    stored: bytes
    removed: bytes = b""


# --- router to worker ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """The router's answer to Hello, and the first message on the stream: the worker is part of the cluster.

    Attributes:
        wants_prefixes: whether it is to be told which prefixes are cached.
    """

    router_incarnation: str
    wants_prefixes: bool = False


@dataclass(frozen=True, slots=True)
class Peer:
    """A decode worker to keep a link to. A new life of the same worker is another peer."""

    worker_id: str
    incarnation: str
    address: str


@dataclass(frozen=True, slots=True)
class Peers:
    """The router tells prefill workers which decode workers to keep links to, each time a worker joins or is lost."""

    decode_workers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class Admit:
    """The router announces an attempt to the decode worker that is to continue it, which remembers it for `duration_s`
    while no lease is granted. `output_ids` are the tokens of earlier attempts.

    Attributes:
        record_id: under this name the worker keeps a record of what it serves of the request, beyond its end; empty:
            none is needed.
        resume_token: kept with the record; workers do not look into it.
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
    """The router has a prefill worker compute an attempt's prompt and hand it over to the decode worker that is named.
    The other fields are those of Admit."""

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
    """A router asks what a worker's clock says, at `sent_ns` of its own (tandem.lifecycle.now_ns). It is answered at
    once."""

    sent_ns: int


@dataclass(frozen=True, slots=True)
class Abort:
    """The router tells an attempt's workers that it is over: its client has left, a stop string has ended the output,
    or the attempt has ended early. A worker that does not know the attempt any more does nothing."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Recall:
    """A router asks a worker for its record of a request, which may have been another router's. Every Recall is
    answered, with the same `recall_id`."""

    recall_id: str
    record_id: str


@dataclass(frozen=True, slots=True)
class RepeatPrefixes:
    """A router has a worker say anew all that it has cached, because some of its CachedPrefixes did not come."""


@dataclass(frozen=True, slots=True)
class ResetCache:
    """A router has a worker forget the prefixes that it has cached, but for pages that are in use."""


# --- prefill worker to decode worker, on their link ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkHello:
    """A prefill worker begins an epoch with it. The decode worker refuses the link if version, life or page format are
    not its own, or if it can open none of the transports.

    Attributes:
        sender_host: which host it is on (tandem.hosts.host_id): a process number means something on its own alone.
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
    """The sender asks for pages for `num_tokens` tokens of an attempt, before it computes the first chunk."""

    lease_id: str
    request_id: str
    attempt: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The sender settles a granted lease: its copies of all pages are over, and the decode worker takes over the
    request with its first token.

    Attributes:
        ship_started_ns: when the sender pushed the first pages, on its clock; 0: there were none to push.
        prefill_cached_len: leading tokens whose KV the sender had before the request.
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
    """The sender gives a lease up, granted or not; this settles it, and none of its copies runs any more.

    Attributes:
        reported: the sender tells the router how the attempt ended, so the receiver does not.
    """

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
    """The receiver takes the link: the epoch is open, on the transport that it chose of those offered.

    Attributes:
        endpoint: where the sender finds the receiving end; only that transport understands it.
        passed_over: those of the offer that stand before it, each with why it was not taken: "name: reason".
    """

    epoch: str
    transport: str
    endpoint: bytes
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkRefused:
    """The receiver does not take the link, and says why.

    Attributes:
        no_transport: the receiver has, or can open, none of the offered transports.
    """

    reason: str
    no_transport: bool = False


@dataclass(frozen=True, slots=True)
class Granted:
    """The receiver promises pages for a lease: it has the KV of the first `cached_len` tokens, and `page_ids` are the
    destinations of those after them, which the sender fills before it settles the lease."""

    lease_id: str
    cached_len: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The receiver will grant no pages for a lease, which settles it.

    Attributes:
        reason: "gone": the attempt has ended; "too_large": the whole pool could not hold it; "unknown": no Admit has
            come for the attempt, or one of another length; "full": too many wait already, and it may be asked for
            again.
    """

    lease_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Revoke:
    """The receiver asks for a granted lease back, because its time is over or the attempt has ended. The sender's
    answer settles it; until then the pages stay leased."""

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
