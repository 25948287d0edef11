from tandem.v1 import inference_pb2 as _inference_pb2
from tandem.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SenderBatch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[SenderMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[SenderMessage, _Mapping]]] = ...) -> None: ...

class ReceiverBatch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ReceiverMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ReceiverMessage, _Mapping]]] = ...) -> None: ...

class SenderMessage(_message.Message):
    __slots__ = ("hello", "lease_request", "committed", "released", "renewed", "pushing")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LEASE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    PUSHING_FIELD_NUMBER: _ClassVar[int]
    hello: LinkHello
    lease_request: LeaseRequest
    committed: Committed
    released: Released
    renewed: Renewed
    pushing: Pushing
    def __init__(self, hello: _Optional[_Union[LinkHello, _Mapping]] = ..., lease_request: _Optional[_Union[LeaseRequest, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., released: _Optional[_Union[Released, _Mapping]] = ..., renewed: _Optional[_Union[Renewed, _Mapping]] = ..., pushing: _Optional[_Union[Pushing, _Mapping]] = ...) -> None: ...

class ReceiverMessage(_message.Message):
    __slots__ = ("welcome", "refused_link", "granted", "refused", "revoke")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_LINK_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    welcome: LinkWelcome
    refused_link: LinkRefused
    granted: Granted
    refused: Refused
    revoke: Revoke
    def __init__(self, welcome: _Optional[_Union[LinkWelcome, _Mapping]] = ..., refused_link: _Optional[_Union[LinkRefused, _Mapping]] = ..., granted: _Optional[_Union[Granted, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., revoke: _Optional[_Union[Revoke, _Mapping]] = ...) -> None: ...

class HeadSlice(_message.Message):
    __slots__ = ("first", "num", "total")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NUM_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    first: int
    num: int
    total: int
    def __init__(self, first: _Optional[int] = ..., num: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class LinkRank(_message.Message):
    __slots__ = ("pid", "gpu", "heads")
    PID_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    pid: int
    gpu: str
    heads: HeadSlice
    def __init__(self, pid: _Optional[int] = ..., gpu: _Optional[str] = ..., heads: _Optional[_Union[HeadSlice, _Mapping]] = ...) -> None: ...

class LinkHello(_message.Message):
    __slots__ = ("protocol_version", "sender_id", "sender_incarnation", "receiver_incarnation", "page_format", "transports", "ranks", "sender_host")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PAGE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SENDER_HOST_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    sender_id: str
    sender_incarnation: str
    receiver_incarnation: str
    page_format: _worker_pb2.PageFormat
    transports: _containers.RepeatedScalarFieldContainer[str]
    ranks: _containers.RepeatedCompositeFieldContainer[LinkRank]
    sender_host: str
    def __init__(self, protocol_version: _Optional[int] = ..., sender_id: _Optional[str] = ..., sender_incarnation: _Optional[str] = ..., receiver_incarnation: _Optional[str] = ..., page_format: _Optional[_Union[_worker_pb2.PageFormat, _Mapping]] = ..., transports: _Optional[_Iterable[str]] = ..., ranks: _Optional[_Iterable[_Union[LinkRank, _Mapping]]] = ..., sender_host: _Optional[str] = ...) -> None: ...

class LinkWelcome(_message.Message):
    __slots__ = ("epoch", "transport", "heads", "endpoints", "passed_over")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    PASSED_OVER_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    transport: str
    heads: _containers.RepeatedCompositeFieldContainer[HeadSlice]
    endpoints: _containers.RepeatedScalarFieldContainer[bytes]
    passed_over: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[str] = ..., transport: _Optional[str] = ..., heads: _Optional[_Iterable[_Union[HeadSlice, _Mapping]]] = ..., endpoints: _Optional[_Iterable[bytes]] = ..., passed_over: _Optional[_Iterable[str]] = ...) -> None: ...

class LinkRefused(_message.Message):
    __slots__ = ("reason", "no_transport")
    REASON_FIELD_NUMBER: _ClassVar[int]
    NO_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    no_transport: bool
    def __init__(self, reason: _Optional[str] = ..., no_transport: _Optional[bool] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("lease_id", "request_id", "attempt", "num_tokens")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    request_id: str
    attempt: int
    num_tokens: int
    def __init__(self, lease_id: _Optional[str] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ("lease_id", "cached_len", "page_ids")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_LEN_FIELD_NUMBER: _ClassVar[int]
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    cached_len: int
    page_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_id: _Optional[str] = ..., cached_len: _Optional[int] = ..., page_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("lease_id", "reason")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    reason: str
    def __init__(self, lease_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("lease_id", "first_token", "num_pages", "num_tokens", "finish_reason", "ship_started_ns", "logprobs", "prefill_cached_len", "prefill_loaded")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SHIP_STARTED_NS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CACHED_LEN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LOADED_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    first_token: int
    num_pages: int
    num_tokens: int
    finish_reason: str
    ship_started_ns: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    prefill_cached_len: int
    prefill_loaded: _worker_pb2.TierHits
    def __init__(self, lease_id: _Optional[str] = ..., first_token: _Optional[int] = ..., num_pages: _Optional[int] = ..., num_tokens: _Optional[int] = ..., finish_reason: _Optional[str] = ..., ship_started_ns: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., prefill_cached_len: _Optional[int] = ..., prefill_loaded: _Optional[_Union[_worker_pb2.TierHits, _Mapping]] = ...) -> None: ...

class Released(_message.Message):
    __slots__ = ("lease_id", "reported")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REPORTED_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    reported: bool
    def __init__(self, lease_id: _Optional[str] = ..., reported: _Optional[bool] = ...) -> None: ...

class Revoke(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class Pushing(_message.Message):
    __slots__ = ("link_seq", "lease_id", "offset", "num_pages")
    LINK_SEQ_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    link_seq: int
    lease_id: str
    offset: int
    num_pages: int
    def __init__(self, link_seq: _Optional[int] = ..., lease_id: _Optional[str] = ..., offset: _Optional[int] = ..., num_pages: _Optional[int] = ...) -> None: ...

class Renewed(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...
