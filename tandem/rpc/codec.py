"""Translates the messages of tandem.messages to protobuf and back.

A dataclass and the protobuf message of the same name have the same fields, so one codec serves every message. A class
without a protobuf twin fails at import.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tandem import messages as m
from tandem.sampling_params import TokenLogprobs
from tandem.v1 import inference_pb2, kv_link_pb2, store_pb2, worker_pb2

T = TypeVar("T")


class StructCodec:
    def __init__(self, cls: type, proto_cls: type[Message]) -> None:
        names = {f.name for f in proto_cls.DESCRIPTOR.fields}
        own = {f.name for f in dataclasses.fields(cls)}
        if names != own:
            raise TypeError(f"{cls.__name__} has fields {sorted(own)}, its protobuf twin {sorted(names)}")
        self.cls = cls
        self.proto_cls = proto_cls
        hints = get_type_hints(cls)
        fields = [f.name for f in dataclasses.fields(cls)]
        translators = [_translators(hints[name], proto_cls, name) for name in fields]
        # None: the value is passed as it is.
        self._encoders = [(name, encode) for name, (encode, _) in zip(fields, translators, strict=True)]
        # Routers decode every token: fetch all values at once and translate only where needed.
        self._values = _getter(fields)
        self._decoders = [(position, decode) for position, (_, decode) in enumerate(translators) if decode]
        # None is encoded by leaving the field out.
        self._optional = [(i, name) for i, name in enumerate(fields) if NoneType in get_args(hints[name])]
        self._is_plain = not self._decoders and not self._optional

    def encode(self, value: Any) -> Any:
        return self.proto_cls(
            **{
                name: encode(getattr(value, name)) if encode else getattr(value, name)
                for name, encode in self._encoders
            }
        )

    def decode(self, proto: Any) -> Any:
        if self._is_plain:
            return self.cls(*self._values(proto))
        values = [*self._values(proto)]
        for position, decode in self._decoders:
            values[position] = decode(values[position])
        for position, name in self._optional:
            if not proto.HasField(name):
                values[position] = None
        return self.cls(*values)


def _getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    # With a single name, attrgetter returns the bare value.
    return attrgetter(*names) if len(names) > 1 else lambda value: tuple(getattr(value, name) for name in names)


def _translators(
    hint: Any, proto_cls: type[Message], name: str
) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]:
    if get_origin(hint) is tuple:
        (item, *_) = get_args(hint)
        if get_origin(item) is tuple:
            # A map becomes pairs, sorted by key.
            return dict, lambda mapping: tuple(sorted(mapping.items()))
        if not dataclasses.is_dataclass(item):
            # The slice is a list; a tuple from protobuf's own container takes three times as long.
            return None, lambda values: tuple(values[:])
        nested = StructCodec(item, _nested_proto(proto_cls, name))  # type: ignore[arg-type]
        return (
            lambda values: [nested.encode(v) for v in values],
            lambda protos: tuple([nested.decode(p) for p in protos]) if protos else (),
        )
    if dataclasses.is_dataclass(hint):
        nested = StructCodec(hint, _nested_proto(proto_cls, name))  # type: ignore[arg-type]
        return nested.encode, nested.decode
    if (given := next(filter(dataclasses.is_dataclass, get_args(hint)), None)) is not None:
        optional = StructCodec(given, _nested_proto(proto_cls, name))  # type: ignore[arg-type]
        return lambda value: None if value is None else optional.encode(value), optional.decode
    return None, None


def _nested_proto(proto_cls: type[Message], name: str) -> type[Message]:
    return _message_class(proto_cls.DESCRIPTOR.fields_by_name[name])


def _message_class(field: Any) -> type[Message]:
    assert field.message_type is not None
    return GetMessageClass(field.message_type)


class TokensCodec:
    """Translates m.Tokens, which protobuf has as one list per field of its events."""

    def encode(self, tokens: m.Tokens) -> worker_pb2.Tokens:
        events = tokens.events
        logprobs = [LOGPROBS_CODEC.encode(entry) for event in events for entry in event.logprobs]
        return worker_pb2.Tokens(
            request_ids=[event.request_id for event in events],
            attempts=[event.attempt for event in events],
            indices=[event.index for event in events],
            num_tokens=[len(event.token_ids) for event in events],
            token_ids=[token_id for event in events for token_id in event.token_ids],
            num_logprobs=[len(event.logprobs) for event in events] if logprobs else None,
            logprobs=logprobs,
        )

    def decode(self, proto: worker_pb2.Tokens) -> m.Tokens:
        """Raises ValueError if the lists' lengths do not match."""
        token_ids = _cut(tuple(proto.token_ids[:]), proto.num_tokens)
        fields = (proto.request_ids[:], proto.attempts[:], proto.indices[:], token_ids)
        if proto.num_logprobs:
            logprobs = _cut(tuple([LOGPROBS_CODEC.decode(entry) for entry in proto.logprobs]), proto.num_logprobs)
            return m.Tokens(tuple([m.TokenEvent(*event) for event in zip(*fields, logprobs, strict=True)]))
        return m.Tokens(tuple([m.TokenEvent(*event) for event in zip(*fields, strict=True)]))


def _cut(values: tuple[T, ...], lengths: Sequence[int]) -> list[tuple[T, ...]]:
    ends = list(accumulate(lengths))
    if (ends[-1] if ends else 0) != len(values):
        raise ValueError(f"{len(values)} values, and lengths that do not add up to it")
    return [values[start:end] for start, end in zip((0, *ends), ends, strict=False)]


class BatchCodec:
    """Translates lists of messages to one protobuf batch and back."""

    def __init__(self, union: UnionType, batch_cls: type[Message]) -> None:
        self._batch_cls = batch_cls
        self._envelope_cls = _message_class(batch_cls.DESCRIPTOR.fields_by_name["messages"])
        by_class = {_message_class(f).__name__: f for f in self._envelope_cls.DESCRIPTOR.oneofs[0].fields}
        self._encoders: dict[type, tuple[str, StructCodec | TokensCodec]] = {}
        self._decoders: dict[str, StructCodec | TokensCodec] = {}
        for cls in get_args(union):
            f = by_class.pop(cls.__name__)
            codec = TokensCodec() if cls is m.Tokens else StructCodec(cls, _message_class(f))
            self._encoders[cls] = (f.name, codec)
            self._decoders[f.name] = codec
        if by_class:
            raise TypeError(f"no message class for {sorted(by_class)} of {batch_cls.__name__}")

    def encode(self, messages: Iterable[Any]) -> Any:
        batch = self._batch_cls()
        for message in messages:
            name, codec = self._encoders[type(message)]
            batch.messages.append(self._envelope_cls(**{name: codec.encode(message)}))  # type: ignore[attr-defined]
        return batch

    def decode(self, batch: Any) -> list[Any]:
        """Raises ValueError on a message of an unknown kind, from a later protocol version."""
        decoded = []
        for envelope in batch.messages:
            name = envelope.WhichOneof("message")
            if name is None:
                raise ValueError("a message of an unknown kind: the sender speaks another protocol version")
            decoded.append(self._decoders[name].decode(getattr(envelope, name)))
        return decoded


LOGPROBS_CODEC = StructCodec(TokenLogprobs, inference_pb2.TokenLogprobs)
WORKER_CODEC = BatchCodec(m.WorkerMessage, worker_pb2.WorkerBatch)
STORE_REPORT_CODEC = BatchCodec(m.StoreReport, store_pb2.StoreReportBatch)
ROUTER_CODEC = BatchCodec(m.RouterMessage, worker_pb2.RouterBatch)
SENDER_CODEC = BatchCodec(m.SenderMessage, kv_link_pb2.SenderBatch)
RECEIVER_CODEC = BatchCodec(m.ReceiverMessage, kv_link_pb2.ReceiverBatch)
ADAPTERS_CODEC = StructCodec(m.Adapters, worker_pb2.Adapters)
STATS_CODEC = StructCodec(m.WorkerStats, inference_pb2.WorkerStats)
