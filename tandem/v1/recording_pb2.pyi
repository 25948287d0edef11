from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RecordRequest(_message.Message):
    __slots__ = ("duration_s",)
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    duration_s: float
    def __init__(self, duration_s: _Optional[float] = ...) -> None: ...

class RecordedPart(_message.Message):
    __slots__ = ("process", "role", "slices", "num_dropped", "failure", "clock_offset_ns")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFFSET_NS_FIELD_NUMBER: _ClassVar[int]
    process: str
    role: str
    slices: _containers.RepeatedCompositeFieldContainer[RecordedSlice]
    num_dropped: int
    failure: str
    clock_offset_ns: int
    def __init__(self, process: _Optional[str] = ..., role: _Optional[str] = ..., slices: _Optional[_Iterable[_Union[RecordedSlice, _Mapping]]] = ..., num_dropped: _Optional[int] = ..., failure: _Optional[str] = ..., clock_offset_ns: _Optional[int] = ...) -> None: ...

class RecordedSlice(_message.Message):
    __slots__ = ("track", "name", "start_ns", "duration_ns", "request_ids", "request_tokens", "numbers", "detail")
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TRACK_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    track: str
    name: str
    start_ns: int
    duration_ns: int
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    request_tokens: _containers.RepeatedScalarFieldContainer[int]
    numbers: _containers.ScalarMap[str, int]
    detail: str
    def __init__(self, track: _Optional[str] = ..., name: _Optional[str] = ..., start_ns: _Optional[int] = ..., duration_ns: _Optional[int] = ..., request_ids: _Optional[_Iterable[str]] = ..., request_tokens: _Optional[_Iterable[int]] = ..., numbers: _Optional[_Mapping[str, int]] = ..., detail: _Optional[str] = ...) -> None: ...
