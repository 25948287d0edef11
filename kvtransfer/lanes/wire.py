"""A leader's commands to the lanes of another rank, and that rank's reports, as bytes between processes of one host."""

import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import TypeAlias

from tandem.head_slice import HeadSlice
from tandem.kvtransfer.lanes.plan import Lane


@dataclass(frozen=True, slots=True)
class OpenLane:
    """Opens an end. Attributes: number: never used before by this leader; endpoint: None opens a receiving end."""

    number: int
    transport: str
    endpoint: bytes | None
    lane: Lane


@dataclass(frozen=True, slots=True)
class Push:
    """SenderTransport.copy_pages."""

    number: int
    link_seq: int
    src_pages: Sequence[int]
    dst_pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class Receive:
    """ReceiverTransport.receive_pages."""

    number: int
    link_seq: int
    dst_pages: Sequence[int] | None
    num_pages: int


@dataclass(frozen=True, slots=True)
class AbortLane:
    """Ends a lane, open or not. Its last report follows."""

    number: int


LaneCommand: TypeAlias = OpenLane | Push | Receive | AbortLane


@dataclass(frozen=True, slots=True)
class LaneReport:
    """State of a lane.

    Attributes:
        num_completed: pushes or receives that have completed, in order.
        is_open: it has opened.
        is_over: nothing of it touches this rank's or, at a sender, the peer's pages any more. Nothing follows.
        two_sided, endpoint: of the open end; "" of a sending end.
        failure: reason to end the epoch, or why it did not open. Read after the completions that the report counts.
    """

    number: int
    num_completed: int = 0
    is_open: bool = False
    is_over: bool = False
    two_sided: bool = False
    endpoint: bytes = b""
    failure: str = ""


class _Kind(IntEnum):
    OPEN = 0
    PUSH = 1
    RECEIVE = 2
    DISCARD = 3
    ABORT = 4


# Kind, lane, sequence number on the link, number of pages. Page ids or, of OPEN, a JSON text follow.
_COMMAND = struct.Struct("=BIQI")
# Lane, completions, flags, length of the endpoint, which precedes the failure.
_REPORT = struct.Struct("=IQBI")


def encode_command(command: LaneCommand) -> bytes:
    match command:
        case OpenLane(number, transport, endpoint, lane):
            ranks, heads = (lane.sender_rank, lane.receiver_rank), (lane.heads, lane.sender_heads, lane.receiver_heads)
            told = [transport, endpoint.hex() if endpoint is not None else None, ranks, [astuple(one) for one in heads]]
            return _COMMAND.pack(_Kind.OPEN, number, 0, 0) + json.dumps(told).encode()
        case Push(number, link_seq, src_pages, dst_pages):
            pages = array("i", src_pages).tobytes() + array("i", dst_pages).tobytes()
            return _COMMAND.pack(_Kind.PUSH, number, link_seq, len(src_pages)) + pages
        case Receive(number, link_seq, None, num_pages):
            return _COMMAND.pack(_Kind.DISCARD, number, link_seq, num_pages)
        case Receive(number, link_seq, dst_pages, num_pages):
            return _COMMAND.pack(_Kind.RECEIVE, number, link_seq, num_pages) + array("i", dst_pages or ()).tobytes()
        case AbortLane(number):
            return _COMMAND.pack(_Kind.ABORT, number, 0, 0)


def decode_command(message: bytes) -> LaneCommand:
    kind, number, link_seq, num_pages = _COMMAND.unpack_from(message)
    rest = message[_COMMAND.size :]
    match _Kind(kind):
        case _Kind.OPEN:
            transport, endpoint, ranks, heads = json.loads(rest)
            lane = Lane(*ranks, *(HeadSlice(*one) for one in heads))
            return OpenLane(number, transport, bytes.fromhex(endpoint) if endpoint is not None else None, lane)
        case _Kind.ABORT:
            return AbortLane(number)
        case _Kind.DISCARD:
            return Receive(number, link_seq, None, num_pages)
        case _Kind.RECEIVE:
            return Receive(number, link_seq, array("i", rest), num_pages)
        case _Kind.PUSH:
            pages = array("i", rest)
            return Push(number, link_seq, pages[:num_pages], pages[num_pages:])


def encode_report(report: LaneReport) -> bytes:
    flags = report.is_open | report.is_over << 1 | report.two_sided << 2
    head = _REPORT.pack(report.number, report.num_completed, flags, len(report.endpoint))
    return head + report.endpoint + report.failure.encode()


def decode_report(message: bytes) -> LaneReport:
    number, num_completed, flags, length = _REPORT.unpack_from(message)
    endpoint, failure = message[_REPORT.size :][:length], message[_REPORT.size + length :]
    return LaneReport(
        number, num_completed, bool(flags & 1), bool(flags & 2), bool(flags & 4), endpoint, failure.decode()
    )
