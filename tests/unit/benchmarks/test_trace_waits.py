"""What handovers waited for: each moment of one belongs to one stage and to what its thread did then."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import trace_waits
from benchmarks.trace_waits import NOTHING, STAGES, summarize, waits_of
from tandem.deploy.cli.trace_events import Trace
from tandem.lifecycle import DECODE_STARTED, ENDED, FIRST_TOKEN, LAST_TOKEN, RECEIVED
from tandem.recording import DEVICE, ENGINE, HANDOVERS, INBOX, REQUESTS, copies_to
from tandem.v1 import recording_pb2 as pb

US = 1_000
Slice = tuple[str, str, int, int, str]


def a_part(process: str, role: str, slices: list[Slice]) -> pb.RecordedPart:
    """Args: slices: track, name, start and end in microseconds, request."""
    kept = [
        pb.RecordedSlice(
            track=track,
            name=name,
            start_ns=(10_000 + start) * US,
            duration_ns=(end - start) * US,
            request_ids=[request] if request else [],
        )
        for track, name, start, end, request in slices
    ]
    return pb.RecordedPart(process=process, role=role, slices=kept)


def thread(*laps: tuple[str, int, int]) -> list[Slice]:
    return [(ENGINE, name, start, end, "") for name, start, end in laps]


# The first token of "a" comes at 1,000. Another prompt is launched before its pages are pushed, at 4,010, and that they
# are there is seen at 6,010, after a sleep. Committed goes out at the turn's end, at 6,060. It comes at 6,400, when the
# decode worker is composing, which takes it in at 6,610. A step runs until 8,900 before the one with "a" begins.
PREFILL: list[Slice] = [
    *thread(("collect", 900, 1_100), ("compose", 1_100, 1_200), ("launch", 1_200, 4_000), ("cache", 4_000, 4_005)),
    *thread(("settle", 4_005, 4_030), ("sleep", 4_030, 6_000), ("settle", 6_000, 6_030), ("tell", 6_030, 6_060)),
    *thread(("sleep", 6_060, 9_000)),
    (ENGINE, "step", 900, 4_005, ""),
    (DEVICE, "prefill", 1_300, 5_500, "b"),
    (copies_to("decode-0"), "copy", 500, 700, "a"),
    (copies_to("decode-0"), "copy", 4_010, 6_010, "a"),
    (copies_to("decode-0"), "copy", 500, 9_000, "b"),
    # Of a later attempt, after the decode worker had given the first one back.
    (copies_to("decode-0"), "copy", 9_500, 9_700, "a"),
    (HANDOVERS, "handover", 1_000, 6_020, "a"),
]
DECODE: list[Slice] = [
    *thread(("launch", 0, 6_300), ("compose", 6_300, 6_600), ("receive", 6_600, 6_620), ("settle", 6_620, 6_640)),
    *thread(("sleep", 6_640, 8_950), ("compose", 8_950, 9_000), ("launch", 9_000, 9_100)),
    (INBOX, "events wait", 6_400, 6_600, ""),
    (INBOX, "events wait", 100, 200, ""),
    (DEVICE, "decode", 6_000, 8_900, ""),
    (HANDOVERS, "commit", 6_610, 6_630, "a"),
    (HANDOVERS, "wait for step", 6_635, 9_000, "a"),
]
EXPECTED = {
    "push": {"collect": 100, "compose": 100, "launch": 2_800, "cache": 5, "settle": 5},
    "copy": {"settle": 20 + 10, "sleep": 500, "sleep, device: prefill": 5_500 - 4_030},
    "settle": {"settle": 10},
    "leave": {"settle": 10, "tell": 30},
    "way": {"launch": 240, "compose": 100},
    "inbox": {"compose": 200, "receive": 10},
    "arrive": {"receive": 10, "settle": 10},
    "step": {"settle": 10, "sleep": 50, "sleep, device: decode": 8_900 - 6_640, "compose": 50},
}


def a_trace(prefill: list[Slice] = PREFILL, decode: list[Slice] = DECODE) -> dict[str, Any]:
    trace = Trace()
    # A router draws phases of the same names.
    router = a_part("router-0", "router", [(REQUESTS, "request", 0, 10_000, "a")])
    moments = (RECEIVED, 0), (FIRST_TOKEN, 1_100), (DECODE_STARTED, 8_000), (LAST_TOKEN, 9_000), (ENDED, 10_000)
    for name, at in moments:
        router.slices[0].numbers[name] = 2 * 10**18 + at * US
    trace.add(router)
    trace.add(a_part("prefill-0", "prefill", prefill))
    trace.add(a_part("decode-0", "decode", decode))
    return trace.as_json()


def test_each_stage_is_told_by_what_its_thread_did() -> None:
    (waits,), num_partial = waits_of(a_trace())
    assert num_partial == 0 and waits.request_id == "a"
    found: dict[str, dict[str, float]] = {stage: {} for stage in STAGES}
    for (stage, name), took in waits.slices.items():
        found[stage][name] = took
    assert found == {stage: pytest.approx(slices) for stage, slices in EXPECTED.items()}


def test_the_stages_add_up_to_the_handover() -> None:
    (waits,), _ = waits_of(a_trace())
    assert waits.total == pytest.approx(8_000)
    assert sum(waits.slices.values()) == pytest.approx(8_000)
    assert {stage: pytest.approx(took) for stage, took in waits.stages.items()} == {
        stage: sum(slices.values()) for stage, slices in EXPECTED.items()
    }


def test_what_no_slice_says_is_not_anybody_elses() -> None:
    without = [one for one in PREFILL if one[:2] != (ENGINE, "launch")]
    (waits,), _ = waits_of(a_trace(prefill=without))
    assert waits.slices["push", NOTHING] == pytest.approx(2_800)
    assert waits.total == pytest.approx(8_000)


def test_committed_leaves_before_the_next_forward_where_the_turn_goes_on() -> None:
    laps = thread(("settle", 6_000, 6_030), ("compose", 6_030, 6_050), ("launch", 6_050, 6_300))
    until = [one for one in PREFILL if one[0] != ENGINE or one[2] < 6_000]
    (waits,), _ = waits_of(a_trace(prefill=[*until, *laps]))
    assert waits.stages["leave"] == pytest.approx(30)


def test_a_clock_that_is_behind_makes_no_time_negative() -> None:
    early = [(track, name, start - 700, end - 700, request) for track, name, start, end, request in DECODE]
    (waits,), _ = waits_of(a_trace(decode=early))
    assert min(waits.stages.values()) >= 0 and waits.total == pytest.approx(7_300)
    assert sum(waits.slices.values()) == pytest.approx(7_300)


@pytest.mark.parametrize("missing", ["commit", "wait for step"])
def test_a_handover_whose_end_is_not_recorded_is_counted(missing: str) -> None:
    decode = [one for one in DECODE if one[1] != missing]
    assert waits_of(a_trace(decode=decode)) == ([], 1)


def test_a_handover_that_began_before_the_recording_is_counted() -> None:
    late = [one for one in PREFILL if one[0] != ENGINE or one[2] >= 4_000]
    assert waits_of(a_trace(prefill=late)) == ([], 1)


def test_totals_are_over_all_handovers_and_the_longest_slice_comes_first() -> None:
    handovers, _ = waits_of(a_trace())
    figures = summarize([*handovers, trace_waits.Waits("z", 0.0, dict.fromkeys(STAGES, 0.0), {})])
    assert figures["total"]["p50"] == pytest.approx(4.0) and figures["total"]["max"] == pytest.approx(8.0)
    assert figures["slices"]["push: launch"]["sum"] == pytest.approx(2.8)
    assert figures["slices"]["push: launch"]["share_with_any"] == 0.5
    assert next(iter(figures["threads"])) == "prefill: launch"
    # In two stages, by one thread.
    assert figures["threads"]["decode: compose"]["sum"] == pytest.approx(0.1 + 0.2 + 0.05)
    assert figures["stages"]["push"]["max"] == pytest.approx(3.01)


def test_the_command_reads_compressed_files_and_tells_the_longest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "a.trace.json.gz", tmp_path / "waits.json"
    file.write_bytes(gzip.compress(json.dumps(a_trace()).encode()))
    assert trace_waits.main([str(file), "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "2.80 push: launch" in printed and "1 handovers" in printed
    (one,) = json.loads(out.read_text())["handovers"]
    assert one["slices_ms"]["step: sleep, device: decode"] == pytest.approx(2.26)
    assert trace_waits.main([str(tmp_path / "missing")]) == 1
