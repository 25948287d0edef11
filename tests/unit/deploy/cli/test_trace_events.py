from typing import Any

from tandem.deploy.cli.trace_events import Trace
from tandem.lifecycle import (
    ASSIGNED,
    DECODE_STARTED,
    ENDED,
    FIRST_TOKEN,
    LAST_TOKEN,
    PREFILL_STARTED,
    RECEIVED,
    TOKENIZED,
)
from tandem.recording import DEVICE, ENGINE, HANDOVERS, REQUESTS, copies_to
from tandem.v1 import recording_pb2 as pb
from tests.fakes.trace_file import check_trace

# Nanoseconds since the epoch.
START_NS = 1_800_000_000 * 10**9
US = 1000
MOMENTS = (RECEIVED, TOKENIZED, ASSIGNED, PREFILL_STARTED, FIRST_TOKEN, DECODE_STARTED, LAST_TOKEN, ENDED)


def kept(track: str, name: str, start_us: int, end_us: int, *request_ids: str, **numbers: int) -> pb.RecordedSlice:
    return pb.RecordedSlice(
        track=track,
        name=name,
        start_ns=START_NS + start_us * US,
        duration_ns=(end_us - start_us) * US,
        request_ids=request_ids,
        numbers=numbers,
    )


def request(name: str, *moments_us: int) -> pb.RecordedSlice:
    moments = {moment: START_NS + us * US for moment, us in zip(MOMENTS, moments_us, strict=True)}
    return kept(REQUESTS, "request", moments_us[0], moments_us[-1], name, **moments, num_output_tokens=4)


def trace_of(*parts: pb.RecordedPart) -> tuple[Trace, list[dict[str, Any]]]:
    trace = Trace()
    for part in parts:
        trace.add(part)
    made = trace.as_json()
    check_trace(made)
    return trace, made["traceEvents"]


def part(process: str, role: str, *slices: pb.RecordedSlice, **fields: Any) -> pb.RecordedPart:
    return pb.RecordedPart(process=process, role=role, slices=slices, **fields)


def slices_of(events: list[dict[str, Any]], name: str) -> list[tuple[int, float, float]]:
    """Line, start and duration."""
    return [(e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["name"] == name]


def test_requests_that_overlap_have_lines_of_their_own_with_their_phases_inside() -> None:
    _, events = trace_of(
        part(
            "router-0",
            "router",
            request("a", 0, 10, 20, 30, 50, 60, 90, 100),
            request("b", 50, 55, 60, 70, 80, 85, 120, 130),
            request("c", 100, 101, 102, 103, 104, 105, 106, 107),
        )
    )
    assert slices_of(events, "request") == [(1, 0, 100), (2, 50, 80), (1, 100, 7)]
    assert slices_of(events, "prefill") == [(1, 30, 20), (2, 70, 10), (1, 103, 1)]
    inside = [e for e in events if e["ph"] == "X" and e["tid"] == 2 and e["name"] != "request"]
    assert sum(e["dur"] for e in inside) == 80
    (first, *_) = [e for e in events if e["ph"] == "X" and e["name"] == "request"]
    assert first["args"] == {"num_output_tokens": 4, "requests": ["a"]}


def test_an_arrow_goes_through_all_that_happened_to_a_request() -> None:
    _, events = trace_of(
        part("decode-0", "decode", kept(HANDOVERS, "commit", 62, 62, "a"), kept(DEVICE, "decode", 65, 70, "a")),
        part("router-0", "router", request("a", 0, 5, 10, 20, 60, 65, 90, 100)),
        part(
            "prefill-0",
            "prefill",
            kept(ENGINE, "launch", 20, 25, "a", "b"),
            kept(DEVICE, "prefill", 20, 40, "a", "b"),
            kept(copies_to("decode-0"), "copy", 41, 45, "a"),
            kept(DEVICE, "prefill", 40, 60, "a"),
            kept(copies_to("decode-0"), "copy", 60, 61, "a"),
        ),
    )
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == ["router-0", "prefill-0 (prefill)", "decode-0 (decode)"]
    arrows = [e for e in events if e["ph"] in "stf"]
    assert [tracks[e["pid"], e["tid"]] for e in arrows] == [
        "requests",
        "device",
        "copies to decode-0",
        "device",
        "copies to decode-0",
        "handovers",
        "device",
    ]
    # The other request has one slice, so no arrow.
    assert len({e["id"] for e in arrows}) == 1


def test_a_forward_that_was_launched_behind_another_begins_when_that_ends() -> None:
    _, events = trace_of(
        part("p", "prefill", kept(DEVICE, "prefill", 0, 50), kept(DEVICE, "prefill", 20, 90), kept(DEVICE, "x", 30, 90))
    )
    assert slices_of(events, "prefill") == [(1, 0, 50), (1, 50, 40)]
    assert slices_of(events, "x") == [(1, 90, 0.001)]


def test_all_processes_are_on_the_routers_clock() -> None:
    ahead = 7 * US
    _, events = trace_of(
        part("router-0", "router", request("a", 0, 5, 10, 20, 60, 65, 90, 100)),
        part("p", "prefill", kept(DEVICE, "prefill", 27, 67, "a"), clock_offset_ns=ahead),
        part("d", "decode", clock_offset_ns=-ahead),
        part("d", "decode", kept(DEVICE, "decode", 58, 59, "a")),
    )
    assert slices_of(events, "prefill")[-1][1:] == (20, 40)
    assert slices_of(events, "decode")[-1][1:] == (65, 1)


def test_what_is_missing_is_told() -> None:
    trace, events = trace_of(
        part("p", "prefill", failure="it broke off: Socket closed"), part("d", "decode", num_dropped=3)
    )
    assert trace.warnings == [
        "p: it broke off: Socket closed",
        "d: 3 slices did not fit: record for a shorter time",
    ]
    assert {e["ph"] for e in events} == {"M"}
