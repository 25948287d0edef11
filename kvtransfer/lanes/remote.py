"""The leader's side of a follower's lanes."""

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from tandem.engine.kvcache.base import Completion
from tandem.kvtransfer.lanes.plan import Lane
from tandem.kvtransfer.lanes.wire import (
    AbortLane,
    LaneCommand,
    LaneReport,
    OpenLane,
    Push,
    Receive,
    decode_report,
    encode_command,
)
from tandem.kvtransfer.transports.base import ReceiverTransport, SenderTransport
from tandem.kvtransfer.transports.opening import OPEN_TIMEOUT_S
from tandem.messages import LinkRank

# Interval between looks at a lane that opens, in seconds.
OPEN_POLL_S = 0.001


class RankChannel(Protocol):
    """Messages to a follower's lanes and back, whole and in order."""

    def send(self, message: bytes) -> None: ...

    def receive(self) -> Sequence[bytes]:
        """Returns the messages that have come. Never waits."""
        ...


class RemoteRank:
    """One follower and its lanes. Several threads open ends; the engine thread uses them."""

    def __init__(self, rank: LinkRank, channel: RankChannel) -> None:
        self.rank = rank
        self._channel = channel
        self._numbers = itertools.count()
        # Guards the channel and the lanes.
        self._lock = threading.Lock()
        # Lanes that are not over.
        self._lanes: dict[int, _RemoteLane] = {}

    def open_sender(self, transport: str, endpoint: bytes, lane: Lane) -> SenderTransport:
        """Like Transport.open_sender, at the follower. Raises OSError if it does not open there."""
        return _RemoteSender(self._open(transport, endpoint, lane))

    def open_receiver(self, transport: str, lane: Lane) -> ReceiverTransport:
        return _RemoteReceiver(self._open(transport, None, lane))

    def send(self, command: LaneCommand) -> None:
        with self._lock:
            self._channel.send(encode_command(command))

    def look(self) -> None:
        """Takes the reports that have come."""
        with self._lock:
            for message in self._channel.receive():
                report = decode_report(message)
                if (lane := self._lanes.get(report.number)) is not None:
                    lane.report = report
                    if report.is_over:
                        del self._lanes[report.number]

    def _open(self, transport: str, endpoint: bytes | None, lane: Lane) -> "_RemoteLane":
        with self._lock:
            number = next(self._numbers)
            opening = self._lanes[number] = _RemoteLane(self, number)
            self._channel.send(encode_command(OpenLane(number, transport, endpoint, lane)))
        deadline = time.monotonic() + OPEN_TIMEOUT_S
        while not (report := opening.latest()).is_open:
            if report.is_over:
                raise OSError(report.failure)
            if time.monotonic() >= deadline:
                self.send(AbortLane(number))
                raise TimeoutError(f"it did not open within {OPEN_TIMEOUT_S:g} s")
            time.sleep(OPEN_POLL_S)
        return opening


class _RemoteLane:
    """Attributes: report: the latest."""

    def __init__(self, rank: RemoteRank, number: int) -> None:
        self.rank = rank
        self.number = number
        self.report = LaneReport(number)

    def latest(self) -> LaneReport:
        self.rank.look()
        return self.report

    def abort(self) -> Completion:
        self.rank.send(AbortLane(self.number))
        return _Over(self)


class _Over:
    def __init__(self, lane: _RemoteLane) -> None:
        self._lane = lane

    def done(self) -> bool:
        return self._lane.report.is_over or self._lane.latest().is_over


class _Copied:
    """Done when the lane's first `count` pushes or receives are."""

    def __init__(self, lane: _RemoteLane, count: int) -> None:
        self._lane = lane
        self._count = count

    def done(self) -> bool:
        return self._lane.report.num_completed >= self._count or self._lane.latest().num_completed >= self._count


class _RemoteSender(SenderTransport):
    def __init__(self, lane: _RemoteLane) -> None:
        self._lane = lane
        self._num_copies = 0
        self.two_sided = lane.report.two_sided

    @property
    def failure(self) -> str:
        # Copies under way are polled, which takes reports; an idle link's failure shows with its next push.
        return self._lane.report.failure

    def copy_pages(self, link_seq: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> Completion:
        self._lane.rank.send(Push(self._lane.number, link_seq, src_pages, dst_pages))
        self._num_copies += 1
        return _Copied(self._lane, self._num_copies)

    def abort(self) -> Completion:
        return self._lane.abort()


class _RemoteReceiver(ReceiverTransport):
    def __init__(self, lane: _RemoteLane) -> None:
        self._lane = lane
        self._num_receives = 0
        self.two_sided = lane.report.two_sided

    @property
    def failure(self) -> str:
        # Copies under way are polled, which takes reports; an idle link's failure shows with its next push.
        return self._lane.report.failure

    def endpoint(self) -> bytes:
        return self._lane.report.endpoint

    def receive_pages(self, link_seq: int, dst_pages: Sequence[int] | None, num_pages: int) -> Completion:
        self._lane.rank.send(Receive(self._lane.number, link_seq, dst_pages, num_pages))
        self._num_receives += 1
        return _Copied(self._lane, self._num_receives)

    def abort(self) -> Completion:
        return self._lane.abort()
