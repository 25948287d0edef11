"""Reports of a follower's lanes, with a scripted transport."""

import time
from collections.abc import Callable

import pytest

from tandem.engine.kvcache.base import Completion
from tandem.head_slice import HeadSlice
from tandem.kvtransfer.lanes.follower import LaneFollower
from tandem.kvtransfer.lanes.plan import Lane
from tandem.kvtransfer.lanes.wire import (
    AbortLane,
    LaneCommand,
    LaneReport,
    OpenLane,
    Push,
    decode_report,
    encode_command,
)
from tests.fakes.transport import ScriptedOpening, ScriptedTransport

HEAD = HeadSlice(0, 1, 1)
LANE = Lane(0, 0, HEAD, HEAD, HEAD)


class OpenedLane:
    """A follower with one open sending lane. Attributes: end: its transport."""

    end: ScriptedTransport

    def __init__(self) -> None:
        transport = ScriptedOpening()
        self._follower = LaneFollower({"scripted": transport})
        self.obey(OpenLane(0, "scripted", b"scripted", LANE))
        deadline = time.monotonic() + 10.0
        while not (reports := self.poll()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert reports == [LaneReport(0, is_open=True)]
        (self.end,) = transport.senders

    def obey(self, command: LaneCommand) -> None:
        self._follower.obey(encode_command(command))

    def poll(self) -> list[LaneReport]:
        return [decode_report(report) for report in self._follower.poll()]


@pytest.fixture
def lane() -> OpenedLane:
    return OpenedLane()


def test_copies_count_in_order_and_only_once_they_have_completed(lane: OpenedLane) -> None:
    for number in range(2):
        lane.obey(Push(0, number, [1], [2]))
    assert lane.poll() == []
    lane.end.copies[1].is_done = True
    assert lane.poll() == []
    lane.end.copies[0].is_done = True
    assert lane.poll() == [LaneReport(0, 2, is_open=True)]


def test_a_failure_is_reported_with_the_copies_that_it_ended(lane: OpenedLane) -> None:
    lane.obey(Push(0, 0, [1], [2]))
    lane.end.failure_reason = "the peer has gone"
    lane.end.complete_all()
    assert lane.poll() == [LaneReport(0, 1, is_open=True, failure="the peer has gone")]


def test_an_aborted_lane_is_over_when_its_copies_are(lane: OpenedLane) -> None:
    lane.obey(Push(0, 0, [1], [2]))
    lane.obey(AbortLane(0))
    assert lane.poll() == []
    lane.end.complete_all()
    assert lane.poll() == [LaneReport(0, 1, is_open=True, is_over=True)]


def test_the_last_report_counts_copies_that_end_during_the_look(lane: OpenedLane) -> None:
    """No report follows: the leader would keep the pages of an uncounted copy for ever."""
    abort = lane.end.abort

    def abort_and_complete() -> Completion:
        return CompletesWhenAsked(abort(), lane.end.complete_all)

    lane.end.abort = abort_and_complete  # type: ignore[method-assign]
    lane.obey(Push(0, 0, [1], [2]))
    lane.obey(AbortLane(0))
    assert lane.poll() == [LaneReport(0, 1, is_open=True, is_over=True)]


def test_an_end_without_an_endpoint_is_closed() -> None:
    transport = ScriptedOpening()
    transport.endpoint_error = OSError("no address")
    follower = LaneFollower({"scripted": transport})
    follower.obey(encode_command(OpenLane(0, "scripted", None, LANE)))
    deadline = time.monotonic() + 10.0
    while not (reports := follower.poll()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert [decode_report(report) for report in reports] == [LaneReport(0, is_over=True, failure="no address")]
    (end,) = transport.receivers
    while not end.aborted:
        assert time.monotonic() < deadline
        time.sleep(0.001)


class CompletesWhenAsked(Completion):
    def __init__(self, over: Completion, complete: Callable[[], None]) -> None:
        self._over = over
        self._complete = complete

    def done(self) -> bool:
        self._complete()
        return self._over.done()
