from tandem.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LookRequest(_message.Message):
    __slots__ = ("page_format", "keys", "purges")
    PAGE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PURGES_FIELD_NUMBER: _ClassVar[int]
    page_format: _worker_pb2.PageFormat
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    purges: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, page_format: _Optional[_Union[_worker_pb2.PageFormat, _Mapping]] = ..., keys: _Optional[_Iterable[bytes]] = ..., purges: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PageRun(_message.Message):
    __slots__ = ("parent", "namespace", "identities")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    parent: bytes
    namespace: str
    identities: bytes
    def __init__(self, parent: _Optional[bytes] = ..., namespace: _Optional[str] = ..., identities: _Optional[bytes] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("page_format", "keys")
    PAGE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    page_format: _worker_pb2.PageFormat
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, page_format: _Optional[_Union[_worker_pb2.PageFormat, _Mapping]] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PagePart(_message.Message):
    __slots__ = ("content", "digest")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    digest: bytes
    def __init__(self, content: _Optional[bytes] = ..., digest: _Optional[bytes] = ...) -> None: ...

class StoreIntegrityReport(_message.Message):
    __slots__ = ("violation",)
    VIOLATION_FIELD_NUMBER: _ClassVar[int]
    violation: str
    def __init__(self, violation: _Optional[str] = ...) -> None: ...

class StoreReportBatch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[StoreReport]
    def __init__(self, messages: _Optional[_Iterable[_Union[StoreReport, _Mapping]]] = ...) -> None: ...

class StoreReport(_message.Message):
    __slots__ = ("join", "beat", "cached_prefixes", "cache_was_reset")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    CACHED_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    CACHE_WAS_RESET_FIELD_NUMBER: _ClassVar[int]
    join: StoreJoin
    beat: StoreBeat
    cached_prefixes: _worker_pb2.CachedPrefixes
    cache_was_reset: CacheWasReset
    def __init__(self, join: _Optional[_Union[StoreJoin, _Mapping]] = ..., beat: _Optional[_Union[StoreBeat, _Mapping]] = ..., cached_prefixes: _Optional[_Union[_worker_pb2.CachedPrefixes, _Mapping]] = ..., cache_was_reset: _Optional[_Union[CacheWasReset, _Mapping]] = ...) -> None: ...

class StoreJoin(_message.Message):
    __slots__ = ("protocol_version", "store_id", "incarnation", "host", "rack", "address", "pid", "metrics_address")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    store_id: str
    incarnation: str
    host: str
    rack: str
    address: str
    pid: int
    metrics_address: str
    def __init__(self, protocol_version: _Optional[int] = ..., store_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., host: _Optional[str] = ..., rack: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class StoreBeat(_message.Message):
    __slots__ = ("num_slots", "num_host_pages", "num_disk_pages", "num_disk_bytes", "is_disk_off")
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_DISK_OFF_FIELD_NUMBER: _ClassVar[int]
    num_slots: int
    num_host_pages: int
    num_disk_pages: int
    num_disk_bytes: int
    is_disk_off: bool
    def __init__(self, num_slots: _Optional[int] = ..., num_host_pages: _Optional[int] = ..., num_disk_pages: _Optional[int] = ..., num_disk_bytes: _Optional[int] = ..., is_disk_off: _Optional[bool] = ...) -> None: ...

class CacheWasReset(_message.Message):
    __slots__ = ("number", "failure")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    number: int
    failure: str
    def __init__(self, number: _Optional[int] = ..., failure: _Optional[str] = ...) -> None: ...

class StoreClientBatch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[StoreClientMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[StoreClientMessage, _Mapping]]] = ...) -> None: ...

class StoreServerBatch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[StoreServerMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[StoreServerMessage, _Mapping]]] = ...) -> None: ...

class StoreClientMessage(_message.Message):
    __slots__ = ("hello", "put", "wrote", "gave_up", "find", "end_find", "purge")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PUT_FIELD_NUMBER: _ClassVar[int]
    WROTE_FIELD_NUMBER: _ClassVar[int]
    GAVE_UP_FIELD_NUMBER: _ClassVar[int]
    FIND_FIELD_NUMBER: _ClassVar[int]
    END_FIND_FIELD_NUMBER: _ClassVar[int]
    PURGE_FIELD_NUMBER: _ClassVar[int]
    hello: StoreHello
    put: Put
    wrote: Wrote
    gave_up: GaveUp
    find: Find
    end_find: EndFind
    purge: Purge
    def __init__(self, hello: _Optional[_Union[StoreHello, _Mapping]] = ..., put: _Optional[_Union[Put, _Mapping]] = ..., wrote: _Optional[_Union[Wrote, _Mapping]] = ..., gave_up: _Optional[_Union[GaveUp, _Mapping]] = ..., find: _Optional[_Union[Find, _Mapping]] = ..., end_find: _Optional[_Union[EndFind, _Mapping]] = ..., purge: _Optional[_Union[Purge, _Mapping]] = ...) -> None: ...

class StoreServerMessage(_message.Message):
    __slots__ = ("welcome", "refused", "granted", "found", "purged")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    PURGED_FIELD_NUMBER: _ClassVar[int]
    welcome: StoreWelcome
    refused: StoreRefused
    granted: PutGranted
    found: Found
    purged: Purged
    def __init__(self, welcome: _Optional[_Union[StoreWelcome, _Mapping]] = ..., refused: _Optional[_Union[StoreRefused, _Mapping]] = ..., granted: _Optional[_Union[PutGranted, _Mapping]] = ..., found: _Optional[_Union[Found, _Mapping]] = ..., purged: _Optional[_Union[Purged, _Mapping]] = ...) -> None: ...

class StoreHello(_message.Message):
    __slots__ = ("protocol_version", "worker_id", "incarnation", "pid", "page_format", "attempt", "region_id", "follower_pids")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PAGE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    FOLLOWER_PIDS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    worker_id: str
    incarnation: str
    pid: int
    page_format: _worker_pb2.PageFormat
    attempt: int
    region_id: str
    follower_pids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, protocol_version: _Optional[int] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., pid: _Optional[int] = ..., page_format: _Optional[_Union[_worker_pb2.PageFormat, _Mapping]] = ..., attempt: _Optional[int] = ..., region_id: _Optional[str] = ..., follower_pids: _Optional[_Iterable[int]] = ...) -> None: ...

class StoreWelcome(_message.Message):
    __slots__ = ("epoch", "num_slots")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    num_slots: int
    def __init__(self, epoch: _Optional[str] = ..., num_slots: _Optional[int] = ...) -> None: ...

class StoreRefused(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Put(_message.Message):
    __slots__ = ("number", "namespace", "parent", "keys", "identities")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    number: int
    namespace: str
    parent: bytes
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    identities: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, number: _Optional[int] = ..., namespace: _Optional[str] = ..., parent: _Optional[bytes] = ..., keys: _Optional[_Iterable[bytes]] = ..., identities: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PutGranted(_message.Message):
    __slots__ = ("number", "slots", "generations")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    number: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class Wrote(_message.Message):
    __slots__ = ("slots", "generations")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slots: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class GaveUp(_message.Message):
    __slots__ = ("slots", "generations")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slots: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class Find(_message.Message):
    __slots__ = ("number", "keys")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    number: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, number: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Found(_message.Message):
    __slots__ = ("number", "first", "slots", "generations", "tiers", "num_coming", "is_asking")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMING_FIELD_NUMBER: _ClassVar[int]
    IS_ASKING_FIELD_NUMBER: _ClassVar[int]
    number: int
    first: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    tiers: _containers.RepeatedScalarFieldContainer[int]
    num_coming: int
    is_asking: bool
    def __init__(self, number: _Optional[int] = ..., first: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., tiers: _Optional[_Iterable[int]] = ..., num_coming: _Optional[int] = ..., is_asking: _Optional[bool] = ...) -> None: ...

class EndFind(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Purge(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Purged(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...
