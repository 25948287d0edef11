from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "token_ids", "chat", "sampling", "priority", "cache_namespace", "session_id", "resume", "structured_output")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    token_ids: TokenIds
    chat: Chat
    sampling: SamplingParams
    priority: int
    cache_namespace: str
    session_id: str
    resume: Resume
    structured_output: StructuredOutput
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., cache_namespace: _Optional[str] = ..., session_id: _Optional[str] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., structured_output: _Optional[_Union[StructuredOutput, _Mapping]] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("json_schema", "regex", "choices", "grammar")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    choices: Choices
    grammar: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., choices: _Optional[_Union[Choices, _Mapping]] = ..., grammar: _Optional[str] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("token", "token_ids", "num_characters", "proof")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHARACTERS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_characters: int
    proof: bytes
    def __init__(self, token: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_characters: _Optional[int] = ..., proof: _Optional[bytes] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "logit_bias", "stop", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "min_tokens", "allowed_token_ids", "logprob_token_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: _containers.ScalarMap[int, float]
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    min_tokens: int
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., min_tokens: _Optional[int] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("logprobs", "ranks", "num_top", "top_token_ids", "top_logprobs")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    num_top: int
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., num_top: _Optional[int] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "index", "token_ids", "text", "logprobs", "finish_reason", "usage", "phases", "handover", "resume_token", "prompt_logprobs", "clock_uncertainty_ms", "resume_proof")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_UNCERTAINTY_MS_FIELD_NUMBER: _ClassVar[int]
    RESUME_PROOF_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: FinishReason
    usage: Usage
    phases: _containers.RepeatedCompositeFieldContainer[Phase]
    handover: HandoverSummary
    resume_token: bytes
    prompt_logprobs: PromptLogprobs
    clock_uncertainty_ms: float
    resume_proof: bytes
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., phases: _Optional[_Iterable[_Union[Phase, _Mapping]]] = ..., handover: _Optional[_Union[HandoverSummary, _Mapping]] = ..., resume_token: _Optional[bytes] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., clock_uncertainty_ms: _Optional[float] = ..., resume_proof: _Optional[bytes] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("request_id", "model", "inputs", "normalize", "dimensions", "truncate_prompt_tokens", "keep_last_tokens", "priority", "cache_namespace")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEEP_LAST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    inputs: _containers.RepeatedCompositeFieldContainer[EmbedInput]
    normalize: bool
    dimensions: int
    truncate_prompt_tokens: int
    keep_last_tokens: bool
    priority: int
    cache_namespace: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[EmbedInput, _Mapping]]] = ..., normalize: _Optional[bool] = ..., dimensions: _Optional[int] = ..., truncate_prompt_tokens: _Optional[int] = ..., keep_last_tokens: _Optional[bool] = ..., priority: _Optional[int] = ..., cache_namespace: _Optional[str] = ...) -> None: ...

class EmbedInput(_message.Message):
    __slots__ = ("text", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("request_id", "index", "values", "usage")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    values: _containers.RepeatedScalarFieldContainer[float]
    usage: Usage
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., values: _Optional[_Iterable[float]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "completion_tokens", "host_tokens", "disk_tokens", "peer_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PEER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    host_tokens: int
    disk_tokens: int
    peer_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ..., disk_tokens: _Optional[int] = ..., peer_tokens: _Optional[int] = ...) -> None: ...

class Phase(_message.Message):
    __slots__ = ("name", "start_ms", "duration_ms", "on_critical_path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_MS_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    ON_CRITICAL_PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    start_ms: float
    duration_ms: float
    on_critical_path: bool
    def __init__(self, name: _Optional[str] = ..., start_ms: _Optional[float] = ..., duration_ms: _Optional[float] = ..., on_critical_path: _Optional[bool] = ...) -> None: ...

class HandoverSummary(_message.Message):
    __slots__ = ("prefill_worker", "decode_worker", "attempts", "page_size", "prefill_cached_tokens", "decode_cached_tokens", "pages_computed", "pages_shipped", "placement", "placement_reason", "estimated_ttft_ms", "estimated_itl_ms", "drafted_tokens", "accepted_tokens")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PAGES_SHIPPED_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_REASON_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_ITL_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    decode_worker: str
    attempts: int
    page_size: int
    prefill_cached_tokens: int
    decode_cached_tokens: int
    pages_computed: int
    pages_shipped: int
    placement: str
    placement_reason: str
    estimated_ttft_ms: float
    estimated_itl_ms: float
    drafted_tokens: int
    accepted_tokens: int
    def __init__(self, prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., attempts: _Optional[int] = ..., page_size: _Optional[int] = ..., prefill_cached_tokens: _Optional[int] = ..., decode_cached_tokens: _Optional[int] = ..., pages_computed: _Optional[int] = ..., pages_shipped: _Optional[int] = ..., placement: _Optional[str] = ..., placement_reason: _Optional[str] = ..., estimated_ttft_ms: _Optional[float] = ..., estimated_itl_ms: _Optional[float] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("version", "model", "max_model_len", "ready", "not_ready_reason", "num_requests", "workers", "routers", "placements", "stores", "sizes", "adapters")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    max_model_len: int
    ready: bool
    not_ready_reason: str
    num_requests: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    routers: _containers.RepeatedCompositeFieldContainer[RouterStatus]
    placements: _containers.RepeatedCompositeFieldContainer[PlacementCount]
    stores: _containers.RepeatedCompositeFieldContainer[StoreStatus]
    sizes: _containers.RepeatedCompositeFieldContainer[SizeStatus]
    adapters: _containers.RepeatedCompositeFieldContainer[LoadedAdapter]
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., max_model_len: _Optional[int] = ..., ready: _Optional[bool] = ..., not_ready_reason: _Optional[str] = ..., num_requests: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., routers: _Optional[_Iterable[_Union[RouterStatus, _Mapping]]] = ..., placements: _Optional[_Iterable[_Union[PlacementCount, _Mapping]]] = ..., stores: _Optional[_Iterable[_Union[StoreStatus, _Mapping]]] = ..., sizes: _Optional[_Iterable[_Union[SizeStatus, _Mapping]]] = ..., adapters: _Optional[_Iterable[_Union[LoadedAdapter, _Mapping]]] = ...) -> None: ...

class SizeStatus(_message.Message):
    __slots__ = ("kind", "low", "high", "target", "ready", "starting", "leaving", "start_s", "reason", "no_room")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NO_ROOM_FIELD_NUMBER: _ClassVar[int]
    kind: str
    low: int
    high: int
    target: int
    ready: int
    starting: int
    leaving: int
    start_s: float
    reason: str
    no_room: str
    def __init__(self, kind: _Optional[str] = ..., low: _Optional[int] = ..., high: _Optional[int] = ..., target: _Optional[int] = ..., ready: _Optional[int] = ..., starting: _Optional[int] = ..., leaving: _Optional[int] = ..., start_s: _Optional[float] = ..., reason: _Optional[str] = ..., no_room: _Optional[str] = ...) -> None: ...

class PlacementCount(_message.Message):
    __slots__ = ("placement", "reason", "count")
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    placement: str
    reason: str
    count: int
    def __init__(self, placement: _Optional[str] = ..., reason: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class RouterStatus(_message.Message):
    __slots__ = ("router_id", "grpc_address", "http_address", "alive", "num_requests", "pid")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    grpc_address: str
    http_address: str
    alive: bool
    num_requests: int
    pid: int
    def __init__(self, router_id: _Optional[str] = ..., grpc_address: _Optional[str] = ..., http_address: _Optional[str] = ..., alive: _Optional[bool] = ..., num_requests: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class StoreStatus(_message.Message):
    __slots__ = ("store_id", "pid", "address", "alive", "metrics_address", "num_slots", "num_host_pages", "num_disk_pages", "num_disk_bytes", "is_disk_off")
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_DISK_OFF_FIELD_NUMBER: _ClassVar[int]
    store_id: str
    pid: int
    address: str
    alive: bool
    metrics_address: str
    num_slots: int
    num_host_pages: int
    num_disk_pages: int
    num_disk_bytes: int
    is_disk_off: bool
    def __init__(self, store_id: _Optional[str] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., alive: _Optional[bool] = ..., metrics_address: _Optional[str] = ..., num_slots: _Optional[int] = ..., num_host_pages: _Optional[int] = ..., num_disk_pages: _Optional[int] = ..., num_disk_bytes: _Optional[int] = ..., is_disk_off: _Optional[bool] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "role", "device", "pid", "address", "alive", "scheduler_step", "linked_to", "stats", "metrics_address", "rack", "lean", "follower_pids", "num_links")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_STEP_FIELD_NUMBER: _ClassVar[int]
    LINKED_TO_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    LEAN_FIELD_NUMBER: _ClassVar[int]
    FOLLOWER_PIDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LINKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    device: str
    pid: int
    address: str
    alive: bool
    scheduler_step: int
    linked_to: _containers.RepeatedScalarFieldContainer[str]
    stats: WorkerStats
    metrics_address: str
    rack: str
    lean: str
    follower_pids: _containers.RepeatedScalarFieldContainer[int]
    num_links: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., device: _Optional[str] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., alive: _Optional[bool] = ..., scheduler_step: _Optional[int] = ..., linked_to: _Optional[_Iterable[str]] = ..., stats: _Optional[_Union[WorkerStats, _Mapping]] = ..., metrics_address: _Optional[str] = ..., rack: _Optional[str] = ..., lean: _Optional[str] = ..., follower_pids: _Optional[_Iterable[int]] = ..., num_links: _Optional[int] = ...) -> None: ...

class WorkerStats(_message.Message):
    __slots__ = ("num_queued", "num_running", "num_total_pages", "num_free_pages", "num_cached_pages", "num_locked_pages", "num_leased_pages", "prompt_tokens_computed", "output_tokens_computed", "prefix_cached_tokens", "num_given_back", "num_leases_expired", "shipped", "forward_times", "prefix_host_tokens", "prefix_disk_tokens", "prefix_peer_tokens", "load_token_s", "num_queued_tokens", "drafted", "num_adapters_on_device", "num_adapters_in_host", "num_adapter_loads", "adapter_load_ns")
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_LOCKED_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASED_PAGES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GIVEN_BACK_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    SHIPPED_FIELD_NUMBER: _ClassVar[int]
    FORWARD_TIMES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_PEER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ADAPTERS_ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    NUM_ADAPTERS_IN_HOST_FIELD_NUMBER: _ClassVar[int]
    NUM_ADAPTER_LOADS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOAD_NS_FIELD_NUMBER: _ClassVar[int]
    num_queued: int
    num_running: int
    num_total_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_locked_pages: int
    num_leased_pages: int
    prompt_tokens_computed: int
    output_tokens_computed: int
    prefix_cached_tokens: int
    num_given_back: int
    num_leases_expired: int
    shipped: _containers.RepeatedCompositeFieldContainer[Shipped]
    forward_times: ForwardTimes
    prefix_host_tokens: int
    prefix_disk_tokens: int
    prefix_peer_tokens: int
    load_token_s: _containers.RepeatedScalarFieldContainer[float]
    num_queued_tokens: int
    drafted: _containers.RepeatedCompositeFieldContainer[Drafted]
    num_adapters_on_device: int
    num_adapters_in_host: int
    num_adapter_loads: int
    adapter_load_ns: int
    def __init__(self, num_queued: _Optional[int] = ..., num_running: _Optional[int] = ..., num_total_pages: _Optional[int] = ..., num_free_pages: _Optional[int] = ..., num_cached_pages: _Optional[int] = ..., num_locked_pages: _Optional[int] = ..., num_leased_pages: _Optional[int] = ..., prompt_tokens_computed: _Optional[int] = ..., output_tokens_computed: _Optional[int] = ..., prefix_cached_tokens: _Optional[int] = ..., num_given_back: _Optional[int] = ..., num_leases_expired: _Optional[int] = ..., shipped: _Optional[_Iterable[_Union[Shipped, _Mapping]]] = ..., forward_times: _Optional[_Union[ForwardTimes, _Mapping]] = ..., prefix_host_tokens: _Optional[int] = ..., prefix_disk_tokens: _Optional[int] = ..., prefix_peer_tokens: _Optional[int] = ..., load_token_s: _Optional[_Iterable[float]] = ..., num_queued_tokens: _Optional[int] = ..., drafted: _Optional[_Iterable[_Union[Drafted, _Mapping]]] = ..., num_adapters_on_device: _Optional[int] = ..., num_adapters_in_host: _Optional[int] = ..., num_adapter_loads: _Optional[int] = ..., adapter_load_ns: _Optional[int] = ...) -> None: ...

class Drafted(_message.Message):
    __slots__ = ("source", "num_proposals", "num_tokens", "num_accepted", "num_by_length")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_BY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    source: str
    num_proposals: int
    num_tokens: int
    num_accepted: int
    num_by_length: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, source: _Optional[str] = ..., num_proposals: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_accepted: _Optional[int] = ..., num_by_length: _Optional[_Iterable[int]] = ...) -> None: ...

class ForwardTimes(_message.Message):
    __slots__ = ("prefill_s", "prompt_token_s", "attended_token_s", "step_s", "request_s", "kv_token_s", "gap_beside_prompts_s")
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    ATTENDED_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_S_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    GAP_BESIDE_PROMPTS_S_FIELD_NUMBER: _ClassVar[int]
    prefill_s: float
    prompt_token_s: float
    attended_token_s: float
    step_s: float
    request_s: float
    kv_token_s: float
    gap_beside_prompts_s: float
    def __init__(self, prefill_s: _Optional[float] = ..., prompt_token_s: _Optional[float] = ..., attended_token_s: _Optional[float] = ..., step_s: _Optional[float] = ..., request_s: _Optional[float] = ..., kv_token_s: _Optional[float] = ..., gap_beside_prompts_s: _Optional[float] = ...) -> None: ...

class Shipped(_message.Message):
    __slots__ = ("transport", "num_pages", "num_bytes", "receiver_id", "copying_ns")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_ID_FIELD_NUMBER: _ClassVar[int]
    COPYING_NS_FIELD_NUMBER: _ClassVar[int]
    transport: str
    num_pages: int
    num_bytes: int
    receiver_id: str
    copying_ns: int
    def __init__(self, transport: _Optional[str] = ..., num_pages: _Optional[int] = ..., num_bytes: _Optional[int] = ..., receiver_id: _Optional[str] = ..., copying_ns: _Optional[int] = ...) -> None: ...

class LoadedAdapter(_message.Message):
    __slots__ = ("name", "path", "content_hash", "rank", "targets", "num_bytes", "on_device", "in_host", "num_requests")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    IN_HOST_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    content_hash: str
    rank: int
    targets: _containers.RepeatedScalarFieldContainer[str]
    num_bytes: int
    on_device: _containers.RepeatedScalarFieldContainer[str]
    in_host: _containers.RepeatedScalarFieldContainer[str]
    num_requests: int
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., content_hash: _Optional[str] = ..., rank: _Optional[int] = ..., targets: _Optional[_Iterable[str]] = ..., num_bytes: _Optional[int] = ..., on_device: _Optional[_Iterable[str]] = ..., in_host: _Optional[_Iterable[str]] = ..., num_requests: _Optional[int] = ...) -> None: ...
