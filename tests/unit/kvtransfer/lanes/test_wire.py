"""Commands and reports between a leader and its followers survive the way through bytes."""

from array import array

import pytest

from tandem.head_slice import HeadSlice
from tandem.kvtransfer.lanes.plan import Lane
from tandem.kvtransfer.lanes.wire import (
    AbortLane,
    LaneCommand,
    LaneReport,
    OpenLane,
    Push,
    Receive,
    decode_command,
    decode_report,
    encode_command,
    encode_report,
)

LANE = Lane(1, 2, HeadSlice(2, 1, 4), HeadSlice(2, 2, 4), HeadSlice(2, 1, 4))
LARGEST = 2**31 - 1


@pytest.mark.parametrize(
    "command",
    [
        OpenLane(7, "nvlink", bytes(range(256)), LANE),
        OpenLane(7, "package.module:Class", None, LANE),
        OpenLane(2**32 - 1, "tcp", b"", LANE),
        Push(7, 2**63, array("i", [1, LARGEST]), array("i", [0, 3])),
        Receive(7, 0, array("i", [5, 4, LARGEST]), 3),
        Receive(7, 1, None, 512),
        AbortLane(7),
    ],
)
def test_commands(command: LaneCommand) -> None:
    assert decode_command(encode_command(command)) == command


def test_a_push_of_many_pages_is_short() -> None:
    assert len(encode_command(Push(7, 1, list(range(512)), list(range(512))))) < 4200


@pytest.mark.parametrize(
    "report",
    [
        LaneReport(7),
        LaneReport(7, 2**63, is_open=True, two_sided=True, endpoint=b"\0endpoint"),
        LaneReport(7, 1, is_open=True, failure="the page connection failed: é"),
        LaneReport(7, 1, is_open=True, is_over=True),
    ],
)
def test_reports(report: LaneReport) -> None:
    assert decode_report(encode_report(report)) == report
