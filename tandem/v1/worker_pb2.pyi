from tandem.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CheckIntegrityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerMetrics(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: bytes
    def __init__(self, text: _Optional[bytes] = ...) -> None: ...

class IntegrityReport(_message.Message):
    __slots__ = ("violation", "stats")
    VIOLATION_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    violation: str
    stats: _inference_pb2.WorkerStats
    def __init__(self, violation: _Optional[str] = ..., stats: _Optional[_Union[_inference_pb2.WorkerStats, _Mapping]] = ...) -> None: ...

class WorkerBatch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[WorkerMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[WorkerMessage, _Mapping]]] = ...) -> None: ...

class RouterBatch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[RouterMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[RouterMessage, _Mapping]]] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "heartbeat", "link_state", "first_token", "tokens", "finished", "failed", "prefill_deferred", "gave_back", "lease_lost", "recalled", "unservable", "prompt_scored", "clock_reply", "progress", "cached_prefixes", "embedded", "not_moved", "adapter_checked", "adapter_places", "adapters")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LINK_STATE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DEFERRED_FIELD_NUMBER: _ClassVar[int]
    GAVE_BACK_FIELD_NUMBER: _ClassVar[int]
    LEASE_LOST_FIELD_NUMBER: _ClassVar[int]
    RECALLED_FIELD_NUMBER: _ClassVar[int]
    UNSERVABLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORED_FIELD_NUMBER: _ClassVar[int]
    CLOCK_REPLY_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    EMBEDDED_FIELD_NUMBER: _ClassVar[int]
    NOT_MOVED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_CHECKED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_PLACES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    link_state: LinkState
    first_token: FirstToken
    tokens: Tokens
    finished: Finished
    failed: Failed
    prefill_deferred: PrefillDeferred
    gave_back: GaveBack
    lease_lost: LeaseLost
    recalled: Recalled
    unservable: Unservable
    prompt_scored: PromptScored
    clock_reply: ClockReply
    progress: Progress
    cached_prefixes: CachedPrefixes
    embedded: Embedded
    not_moved: NotMoved
    adapter_checked: AdapterChecked
    adapter_places: AdapterPlaces
    adapters: Adapters
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., link_state: _Optional[_Union[LinkState, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., prefill_deferred: _Optional[_Union[PrefillDeferred, _Mapping]] = ..., gave_back: _Optional[_Union[GaveBack, _Mapping]] = ..., lease_lost: _Optional[_Union[LeaseLost, _Mapping]] = ..., recalled: _Optional[_Union[Recalled, _Mapping]] = ..., unservable: _Optional[_Union[Unservable, _Mapping]] = ..., prompt_scored: _Optional[_Union[PromptScored, _Mapping]] = ..., clock_reply: _Optional[_Union[ClockReply, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., cached_prefixes: _Optional[_Union[CachedPrefixes, _Mapping]] = ..., embedded: _Optional[_Union[Embedded, _Mapping]] = ..., not_moved: _Optional[_Union[NotMoved, _Mapping]] = ..., adapter_checked: _Optional[_Union[AdapterChecked, _Mapping]] = ..., adapter_places: _Optional[_Union[AdapterPlaces, _Mapping]] = ..., adapters: _Optional[_Union[Adapters, _Mapping]] = ...) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("welcome", "peers", "admit", "prefill", "abort", "recall", "reset_cache", "clock_probe", "repeat_prefixes", "move", "check_adapter", "adapters", "namespace_owners")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    RESET_CACHE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_PROBE_FIELD_NUMBER: _ClassVar[int]
    REPEAT_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    CHECK_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_OWNERS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    peers: Peers
    admit: Admit
    prefill: Prefill
    abort: Abort
    recall: Recall
    reset_cache: ResetCache
    clock_probe: ClockProbe
    repeat_prefixes: RepeatPrefixes
    move: Move
    check_adapter: CheckAdapter
    adapters: Adapters
    namespace_owners: NamespaceOwners
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., peers: _Optional[_Union[Peers, _Mapping]] = ..., admit: _Optional[_Union[Admit, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., recall: _Optional[_Union[Recall, _Mapping]] = ..., reset_cache: _Optional[_Union[ResetCache, _Mapping]] = ..., clock_probe: _Optional[_Union[ClockProbe, _Mapping]] = ..., repeat_prefixes: _Optional[_Union[RepeatPrefixes, _Mapping]] = ..., move: _Optional[_Union[Move, _Mapping]] = ..., check_adapter: _Optional[_Union[CheckAdapter, _Mapping]] = ..., adapters: _Optional[_Union[Adapters, _Mapping]] = ..., namespace_owners: _Optional[_Union[NamespaceOwners, _Mapping]] = ...) -> None: ...

class PageFormat(_message.Message):
    __slots__ = ("model_fingerprint", "page_bytes", "layout")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    page_bytes: int
    layout: str
    def __init__(self, model_fingerprint: _Optional[str] = ..., page_bytes: _Optional[int] = ..., layout: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "worker_id", "incarnation", "role", "device", "address", "pid", "page_format", "num_pages", "page_size", "metrics_address", "num_restarts", "has_links", "max_request_pages", "host", "rack", "max_batch_size", "start_s", "follower_pids")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PAGE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    HAS_LINKS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_PAGES_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    FOLLOWER_PIDS_FIELD_NUMBER: _ClassVar[int]
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
    metrics_address: str
    num_restarts: int
    has_links: bool
    max_request_pages: int
    host: str
    rack: str
    max_batch_size: int
    start_s: float
    follower_pids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, protocol_version: _Optional[int] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[str] = ..., device: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., page_format: _Optional[_Union[PageFormat, _Mapping]] = ..., num_pages: _Optional[int] = ..., page_size: _Optional[int] = ..., metrics_address: _Optional[str] = ..., num_restarts: _Optional[int] = ..., has_links: _Optional[bool] = ..., max_request_pages: _Optional[int] = ..., host: _Optional[str] = ..., rack: _Optional[str] = ..., max_batch_size: _Optional[int] = ..., start_s: _Optional[float] = ..., follower_pids: _Optional[_Iterable[int]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("router_incarnation", "wants_prefixes")
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WANTS_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    router_incarnation: str
    wants_prefixes: bool
    def __init__(self, router_incarnation: _Optional[str] = ..., wants_prefixes: _Optional[bool] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("step", "stats")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    step: int
    stats: _inference_pb2.WorkerStats
    def __init__(self, step: _Optional[int] = ..., stats: _Optional[_Union[_inference_pb2.WorkerStats, _Mapping]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("worker_id", "incarnation", "address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    address: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class LinkState(_message.Message):
    __slots__ = ("decode_worker_id", "decode_incarnation", "up", "reason")
    DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    decode_worker_id: str
    decode_incarnation: str
    up: bool
    reason: str
    def __init__(self, decode_worker_id: _Optional[str] = ..., decode_incarnation: _Optional[str] = ..., up: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "seed", "stop_token_ids", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "num_logprobs", "grammar", "min_tokens", "num_prompt_logprobs", "allowed_token_ids", "logprob_token_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    num_logprobs: int
    grammar: str
    min_tokens: int
    num_prompt_logprobs: int
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, max_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., num_logprobs: _Optional[int] = ..., grammar: _Optional[str] = ..., min_tokens: _Optional[int] = ..., num_prompt_logprobs: _Optional[int] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Admit(_message.Message):
    __slots__ = ("request_id", "attempt", "prompt_ids", "output_ids", "sampling", "duration_s", "arrival_ns", "priority", "cache_namespace", "record_id", "resume_token", "client", "prefill_worker_id", "copy_of", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_NS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    RECORD_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    COPY_OF_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    duration_s: float
    arrival_ns: int
    priority: int
    cache_namespace: str
    record_id: str
    resume_token: bytes
    client: str
    prefill_worker_id: str
    copy_of: str
    adapter: AdapterRef
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., duration_s: _Optional[float] = ..., arrival_ns: _Optional[int] = ..., priority: _Optional[int] = ..., cache_namespace: _Optional[str] = ..., record_id: _Optional[str] = ..., resume_token: _Optional[bytes] = ..., client: _Optional[str] = ..., prefill_worker_id: _Optional[str] = ..., copy_of: _Optional[str] = ..., adapter: _Optional[_Union[AdapterRef, _Mapping]] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("request_id", "attempt", "prompt_ids", "output_ids", "sampling", "decode_worker_id", "priority", "arrival_ns", "cache_namespace", "record_id", "resume_token", "embedding", "client", "is_move", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_NS_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    RECORD_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    IS_MOVE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    decode_worker_id: str
    priority: int
    arrival_ns: int
    cache_namespace: str
    record_id: str
    resume_token: bytes
    embedding: EmbeddingParams
    client: str
    is_move: bool
    adapter: AdapterRef
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., decode_worker_id: _Optional[str] = ..., priority: _Optional[int] = ..., arrival_ns: _Optional[int] = ..., cache_namespace: _Optional[str] = ..., record_id: _Optional[str] = ..., resume_token: _Optional[bytes] = ..., embedding: _Optional[_Union[EmbeddingParams, _Mapping]] = ..., client: _Optional[str] = ..., is_move: _Optional[bool] = ..., adapter: _Optional[_Union[AdapterRef, _Mapping]] = ...) -> None: ...

class AdapterRef(_message.Message):
    __slots__ = ("content_hash", "path", "rank", "targets", "num_bytes", "base_model")
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    content_hash: str
    path: str
    rank: int
    targets: _containers.RepeatedScalarFieldContainer[str]
    num_bytes: int
    base_model: str
    def __init__(self, content_hash: _Optional[str] = ..., path: _Optional[str] = ..., rank: _Optional[int] = ..., targets: _Optional[_Iterable[str]] = ..., num_bytes: _Optional[int] = ..., base_model: _Optional[str] = ...) -> None: ...

class AdapterEntry(_message.Message):
    __slots__ = ("name", "version", "origin", "adapter")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    origin: str
    adapter: AdapterRef
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., origin: _Optional[str] = ..., adapter: _Optional[_Union[AdapterRef, _Mapping]] = ...) -> None: ...

class Adapters(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[AdapterEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[AdapterEntry, _Mapping]]] = ...) -> None: ...

class CheckAdapter(_message.Message):
    __slots__ = ("check_id", "path")
    CHECK_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    check_id: str
    path: str
    def __init__(self, check_id: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class AdapterChecked(_message.Message):
    __slots__ = ("check_id", "adapter", "refusal")
    CHECK_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    check_id: str
    adapter: AdapterRef
    refusal: str
    def __init__(self, check_id: _Optional[str] = ..., adapter: _Optional[_Union[AdapterRef, _Mapping]] = ..., refusal: _Optional[str] = ...) -> None: ...

class AdapterPlaces(_message.Message):
    __slots__ = ("on_device", "in_host", "load_byte_s")
    ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    IN_HOST_FIELD_NUMBER: _ClassVar[int]
    LOAD_BYTE_S_FIELD_NUMBER: _ClassVar[int]
    on_device: _containers.RepeatedScalarFieldContainer[str]
    in_host: _containers.RepeatedScalarFieldContainer[str]
    load_byte_s: float
    def __init__(self, on_device: _Optional[_Iterable[str]] = ..., in_host: _Optional[_Iterable[str]] = ..., load_byte_s: _Optional[float] = ...) -> None: ...

class EmbeddingParams(_message.Message):
    __slots__ = ("num_dimensions", "is_normalized")
    NUM_DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    IS_NORMALIZED_FIELD_NUMBER: _ClassVar[int]
    num_dimensions: int
    is_normalized: bool
    def __init__(self, num_dimensions: _Optional[int] = ..., is_normalized: _Optional[bool] = ...) -> None: ...

class Move(_message.Message):
    __slots__ = ("request_id", "attempt", "copy_id", "decode_worker_id", "num_tokens", "cache_namespace")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    COPY_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    copy_id: str
    decode_worker_id: str
    num_tokens: int
    cache_namespace: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., copy_id: _Optional[str] = ..., decode_worker_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., cache_namespace: _Optional[str] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Moment(_message.Message):
    __slots__ = ("name", "time_ns")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TIME_NS_FIELD_NUMBER: _ClassVar[int]
    name: str
    time_ns: int
    def __init__(self, name: _Optional[str] = ..., time_ns: _Optional[int] = ...) -> None: ...

class TierHits(_message.Message):
    __slots__ = ("host", "disk", "peer")
    HOST_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    host: int
    disk: int
    peer: int
    def __init__(self, host: _Optional[int] = ..., disk: _Optional[int] = ..., peer: _Optional[int] = ...) -> None: ...

class PackedLogprobs(_message.Message):
    __slots__ = ("start", "num_top", "logprobs", "ranks", "top_ids", "top_logprobs")
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    start: int
    num_top: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes
    def __init__(self, start: _Optional[int] = ..., num_top: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class PromptScored(_message.Message):
    __slots__ = ("request_id", "attempt", "logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    logprobs: PackedLogprobs
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., logprobs: _Optional[_Union[PackedLogprobs, _Mapping]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("request_id", "attempt", "index", "token_id", "finish_reason", "cached_len", "num_pages_computed", "moments", "logprobs", "loaded")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    CACHED_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    MOMENTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    index: int
    token_id: int
    finish_reason: str
    cached_len: int
    num_pages_computed: int
    moments: _containers.RepeatedCompositeFieldContainer[Moment]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    loaded: TierHits
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., index: _Optional[int] = ..., token_id: _Optional[int] = ..., finish_reason: _Optional[str] = ..., cached_len: _Optional[int] = ..., num_pages_computed: _Optional[int] = ..., moments: _Optional[_Iterable[_Union[Moment, _Mapping]]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., loaded: _Optional[_Union[TierHits, _Mapping]] = ...) -> None: ...

class Embedded(_message.Message):
    __slots__ = ("request_id", "attempt", "values", "cached_len", "num_pages_computed", "moments", "loaded")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    CACHED_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    MOMENTS_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    values: bytes
    cached_len: int
    num_pages_computed: int
    moments: _containers.RepeatedCompositeFieldContainer[Moment]
    loaded: TierHits
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., values: _Optional[bytes] = ..., cached_len: _Optional[int] = ..., num_pages_computed: _Optional[int] = ..., moments: _Optional[_Iterable[_Union[Moment, _Mapping]]] = ..., loaded: _Optional[_Union[TierHits, _Mapping]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("request_ids", "attempts", "indices", "num_tokens", "token_ids", "num_logprobs", "logprobs")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_logprobs: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., attempts: _Optional[_Iterable[int]] = ..., indices: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_logprobs: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("request_id", "attempt", "finish_reason", "num_output_tokens", "cached_len", "num_pages_shipped", "moments", "prefill_cached_len", "prefill_loaded", "num_drafted", "num_accepted")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_SHIPPED_FIELD_NUMBER: _ClassVar[int]
    MOMENTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CACHED_LEN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LOADED_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    finish_reason: str
    num_output_tokens: int
    cached_len: int
    num_pages_shipped: int
    moments: _containers.RepeatedCompositeFieldContainer[Moment]
    prefill_cached_len: int
    prefill_loaded: TierHits
    num_drafted: int
    num_accepted: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., finish_reason: _Optional[str] = ..., num_output_tokens: _Optional[int] = ..., cached_len: _Optional[int] = ..., num_pages_shipped: _Optional[int] = ..., moments: _Optional[_Iterable[_Union[Moment, _Mapping]]] = ..., prefill_cached_len: _Optional[int] = ..., prefill_loaded: _Optional[_Union[TierHits, _Mapping]] = ..., num_drafted: _Optional[int] = ..., num_accepted: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("request_id", "attempt", "moments")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MOMENTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    moments: _containers.RepeatedCompositeFieldContainer[Moment]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., moments: _Optional[_Iterable[_Union[Moment, _Mapping]]] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("request_id", "attempt", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Unservable(_message.Message):
    __slots__ = ("request_id", "attempt", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class PrefillDeferred(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class GaveBack(_message.Message):
    __slots__ = ("request_id", "attempt", "is_move")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    IS_MOVE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    is_move: bool
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., is_move: _Optional[bool] = ...) -> None: ...

class NotMoved(_message.Message):
    __slots__ = ("request_id", "attempt", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class LeaseLost(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Recall(_message.Message):
    __slots__ = ("recall_id", "record_id")
    RECALL_ID_FIELD_NUMBER: _ClassVar[int]
    RECORD_ID_FIELD_NUMBER: _ClassVar[int]
    recall_id: str
    record_id: str
    def __init__(self, recall_id: _Optional[str] = ..., record_id: _Optional[str] = ...) -> None: ...

class ResetCache(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class CachedPrefixes(_message.Message):
    __slots__ = ("number", "is_whole", "stored", "removed", "tier")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    IS_WHOLE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    number: int
    is_whole: bool
    stored: bytes
    removed: bytes
    tier: int
    def __init__(self, number: _Optional[int] = ..., is_whole: _Optional[bool] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., tier: _Optional[int] = ...) -> None: ...

class NamespaceOwners(_message.Message):
    __slots__ = ("owners",)
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    owners: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, owners: _Optional[_Iterable[str]] = ...) -> None: ...

class RepeatPrefixes(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClockProbe(_message.Message):
    __slots__ = ("sent_ns",)
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    sent_ns: int
    def __init__(self, sent_ns: _Optional[int] = ...) -> None: ...

class ClockReply(_message.Message):
    __slots__ = ("sent_ns", "received_ns", "replied_ns")
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_NS_FIELD_NUMBER: _ClassVar[int]
    REPLIED_NS_FIELD_NUMBER: _ClassVar[int]
    sent_ns: int
    received_ns: int
    replied_ns: int
    def __init__(self, sent_ns: _Optional[int] = ..., received_ns: _Optional[int] = ..., replied_ns: _Optional[int] = ...) -> None: ...

class Recalled(_message.Message):
    __slots__ = ("recall_id", "attempt", "token_ids", "resume_token")
    RECALL_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    recall_id: str
    attempt: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    resume_token: bytes
    def __init__(self, recall_id: _Optional[str] = ..., attempt: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., resume_token: _Optional[bytes] = ...) -> None: ...
