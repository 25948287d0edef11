from tandem.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouterCounts(_message.Message):
    __slots__ = ("router_id", "num_requests", "num_queued", "num_requests_by_key", "assigned", "pid", "head_starts", "is_change")
    class NumRequestsByKeyEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class AssignedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: AssignedLoad
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[AssignedLoad, _Mapping]] = ...) -> None: ...
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_BY_KEY_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HEAD_STARTS_FIELD_NUMBER: _ClassVar[int]
    IS_CHANGE_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    num_requests: int
    num_queued: int
    num_requests_by_key: _containers.ScalarMap[str, int]
    assigned: _containers.MessageMap[str, AssignedLoad]
    pid: int
    head_starts: _containers.RepeatedScalarFieldContainer[bytes]
    is_change: bool
    def __init__(self, router_id: _Optional[str] = ..., num_requests: _Optional[int] = ..., num_queued: _Optional[int] = ..., num_requests_by_key: _Optional[_Mapping[str, int]] = ..., assigned: _Optional[_Mapping[str, AssignedLoad]] = ..., pid: _Optional[int] = ..., head_starts: _Optional[_Iterable[bytes]] = ..., is_change: _Optional[bool] = ...) -> None: ...

class AssignedLoad(_message.Message):
    __slots__ = ("num_requests", "num_pending_tokens", "num_decoding", "num_kv_tokens", "num_arriving_tokens")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODING_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ARRIVING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    num_pending_tokens: int
    num_decoding: int
    num_kv_tokens: int
    num_arriving_tokens: int
    def __init__(self, num_requests: _Optional[int] = ..., num_pending_tokens: _Optional[int] = ..., num_decoding: _Optional[int] = ..., num_kv_tokens: _Optional[int] = ..., num_arriving_tokens: _Optional[int] = ...) -> None: ...

class ShareCountsEnd(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FindResponseRequest(_message.Message):
    __slots__ = ("response_id", "key_digest", "with_earlier", "forget", "cancel")
    RESPONSE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WITH_EARLIER_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    response_id: str
    key_digest: str
    with_earlier: bool
    forget: bool
    cancel: bool
    def __init__(self, response_id: _Optional[str] = ..., key_digest: _Optional[str] = ..., with_earlier: _Optional[bool] = ..., forget: _Optional[bool] = ..., cancel: _Optional[bool] = ...) -> None: ...

class FindResponseResult(_message.Message):
    __slots__ = ("found", "answer", "turns")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    found: bool
    answer: bytes
    turns: _containers.RepeatedCompositeFieldContainer[ResponseTurn]
    def __init__(self, found: _Optional[bool] = ..., answer: _Optional[bytes] = ..., turns: _Optional[_Iterable[_Union[ResponseTurn, _Mapping]]] = ...) -> None: ...

class ResponseTurn(_message.Message):
    __slots__ = ("input_items", "output_items")
    INPUT_ITEMS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_ITEMS_FIELD_NUMBER: _ClassVar[int]
    input_items: bytes
    output_items: bytes
    def __init__(self, input_items: _Optional[bytes] = ..., output_items: _Optional[bytes] = ...) -> None: ...

class ChangeConversationRequest(_message.Message):
    __slots__ = ("conversation_id", "key_digest", "turn", "answer")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    key_digest: str
    turn: ResponseTurn
    answer: bytes
    def __init__(self, conversation_id: _Optional[str] = ..., key_digest: _Optional[str] = ..., turn: _Optional[_Union[ResponseTurn, _Mapping]] = ..., answer: _Optional[bytes] = ...) -> None: ...

class ChangeConversationResult(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: _Optional[bool] = ...) -> None: ...
