"""A follower's side of its lanes: executes the leader's commands."""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from tandem.engine.kvcache.base import Completion
from tandem.kvtransfer.lanes.wire import (
    AbortLane,
    LaneReport,
    OpenLane,
    Push,
    decode_command,
    encode_report,
)
from tandem.kvtransfer.transports.base import COMPLETED, ReceiverTransport, SenderTransport, Transport
from tandem.kvtransfer.transports.opening import describe, let_go, start_opening


@dataclass(eq=False, slots=True)
class _Driven:
    """A lane. Attributes: end: None until it has opened; over: completion of its abort; report: the last one sent."""

    opening: "Future[SenderTransport] | Future[ReceiverTransport]"
    report: LaneReport
    end: SenderTransport | ReceiverTransport | None = None
    endpoint: bytes = b""
    under_way: deque[Completion] = field(default_factory=deque)
    num_completed: int = 0
    over: Completion | None = None


class LaneFollower:
    """Drives this rank's lanes. Belongs to one thread, with this rank's device."""

    def __init__(self, transports: Mapping[str, Transport]) -> None:
        """Args: transports: those of the leader, made for this rank's pool."""
        self._transports = transports
        self._lanes: dict[int, _Driven] = {}

    @property
    def is_busy(self) -> bool:
        """Whether `poll` may have a report before the next command."""
        return any(lane.end is None or lane.under_way or lane.over is not None for lane in self._lanes.values())

    def obey(self, message: bytes) -> None:
        """Begins what an encoded command says. Never waits for a device or a peer."""
        command = decode_command(message)
        if isinstance(command, OpenLane):
            self._lanes[command.number] = _Driven(self._open(command), LaneReport(command.number))
            return
        lane = self._lanes.get(command.number)
        # It did not open; the leader sent this before it had the report.
        if lane is None:
            return
        if isinstance(command, AbortLane):
            self._abort(command.number, lane)
            return
        end = lane.end
        if isinstance(command, Push):
            assert isinstance(end, SenderTransport)
            copy = end.copy_pages(command.link_seq, command.src_pages, command.dst_pages)
        else:
            assert isinstance(end, ReceiverTransport)
            copy = end.receive_pages(command.link_seq, command.dst_pages, command.num_pages)
        lane.under_way.append(copy)

    def poll(self) -> list[bytes]:
        """Returns encoded reports of the lanes whose state has changed.

        Raises:
            RuntimeError: pages may be touched without an end. The process must end.
        """
        reports = []
        for number, lane in list(self._lanes.items()):
            report = self._report(number, lane)
            if report != lane.report:
                lane.report = report
                reports.append(encode_report(report))
            if report.is_over:
                self._lanes.pop(number, None)
        return reports

    def _open(self, command: OpenLane) -> "Future[SenderTransport] | Future[ReceiverTransport]":
        transport, endpoint, lane = self._transports[command.transport], command.endpoint, command.lane
        if endpoint is None:
            return start_opening(lambda: transport.open_receiver(lane))
        return start_opening(lambda: transport.open_sender(endpoint, lane))

    def _report(self, number: int, lane: _Driven) -> LaneReport:
        if lane.end is None and lane.over is None:
            if not lane.opening.done():
                return lane.report
            if error := lane.opening.exception():
                return LaneReport(number, is_over=True, failure=describe(error))
            end: SenderTransport | ReceiverTransport = lane.opening.result()
            try:
                lane.endpoint = end.endpoint() if isinstance(end, ReceiverTransport) else b""
            except Exception as error:
                let_go(end)
                return LaneReport(number, is_over=True, failure=describe(error))
            lane.end = end
        # First: an aborted sender's copies have ended by then, and the last report counts them all.
        is_over = lane.over is not None and lane.over.done()
        if lane.end is None:
            return LaneReport(number, is_over=is_over)
        while lane.under_way and lane.under_way[0].done():
            lane.under_way.popleft()
            lane.num_completed += 1
        # A transport sets its failure before copies end without arrival.
        return LaneReport(
            number, lane.num_completed, True, is_over, lane.end.two_sided, lane.endpoint, lane.end.failure
        )

    def _abort(self, number: int, lane: _Driven) -> None:
        if lane.end is None and lane.opening.cancel():
            # Its thread closes it when it opens, and it has touched nothing.
            lane.over = COMPLETED
            return
        self._report(number, lane)
        if lane.end is not None:
            lane.over = lane.end.abort()
