import itertools
import sys

import pytest

from tandem.recording import DEVICE, ENGINE, MIN_LAP_NS, Recorder, Slice

LAP_NS = 10 * MIN_LAP_NS


def ticking() -> Recorder:
    """Its clock advances by a lap at each reading."""
    numbers = itertools.count(1)
    return Recorder(clock=lambda: next(numbers) * LAP_NS)


def slices_of(recorder: Recorder) -> list[Slice]:
    recording = recorder.stop()
    return recording.take(len(recording))


def names(slices: object) -> list[str]:
    return [kept.name for kept in slices]  # type: ignore[attr-defined]


def test_slices_of_a_thread_have_no_gaps() -> None:
    recorder = ticking()
    recorder.start()
    recorder.begin_turn()
    recorder.lap("receive", num_events=2)
    recorder.lap("settle")
    recorder.end_turn(7, worked=True)
    recorder.lap("sleep")
    slices = slices_of(recorder)
    assert names(slices) == ["receive", "settle", "tell", "step", "sleep"]
    receive, settle, tell, step, sleep = slices
    assert (receive.end_ns, settle.end_ns, tell.end_ns) == (settle.start_ns, tell.start_ns, sleep.start_ns)
    assert (step.start_ns, step.end_ns) == (receive.start_ns, tell.end_ns)
    assert (receive.numbers, step.numbers) == ({"num_events": 2}, {"number": 7})
    assert {kept.track for kept in slices} == {ENGINE}


def test_idle_turns_leave_only_slow_slices() -> None:
    times = iter([0, 0, 1, 2, 3, 4 + MIN_LAP_NS, 9 * MIN_LAP_NS])
    recorder = Recorder(clock=lambda: next(times))
    recorder.start()
    recorder.begin_turn()
    recorder.lap("settle")
    recorder.lap("compose")
    recorder.end_turn(1, worked=False)
    recorder.lap("sleep")
    assert names(slices_of(recorder)) == ["sleep"]


def test_the_oldest_slices_are_dropped_and_counted() -> None:
    recorder = Recorder(max_slices=3)
    recorder.start()
    for number in range(5):
        recorder.add("track", str(number), 1)
    recording = recorder.stop()
    assert (names(recording.take(9)), recording.num_dropped) == (["2", "3", "4"], 2)
    recorder.start()
    recorder.add("track", "anew", 1)
    assert (names(slices_of(recorder)), recorder.is_on) == (["anew"], False)


def test_a_forward_is_seen_to_end_without_being_waited_for() -> None:
    recorder = ticking()
    recorder.start()
    ended: list[bool] = []
    recorder.lap("compose")
    recorder.launched("prefill", lambda: bool(ended), lambda: 0.5, ["a", "b"], [3, 4], num_tokens=7)
    recorder.look()
    ended.append(True)
    recorder.look()
    compose, launch, forward = slices_of(recorder)
    assert (launch.track, launch.name, launch.start_ns, launch.request_ids) == (
        ENGINE,
        "launch",
        compose.end_ns,
        ["a", "b"],
    )
    # From the launch until the end is noticed.
    assert forward == Slice(
        DEVICE,
        "prefill",
        launch.start_ns,
        launch.end_ns + LAP_NS,
        ["a", "b"],
        [3, 4],
        {"num_tokens": 7, "device_us": 500_000},
        "",
    )


def test_unfinished_slices_are_returned_once() -> None:
    recorder = ticking()
    recorder.start()
    recorder.started("copies", "copy", 1, lambda: False, "a", num_pages=2)
    (copy,) = slices_of(recorder)
    assert (copy.name, copy.detail, copy.numbers) == ("copy", "still under way", {"num_pages": 2})
    recorder.start()
    assert slices_of(recorder) == []


def test_recorder_off_keeps_and_allocates_nothing() -> None:
    def looked_at() -> int:
        pytest.fail("the clock was looked at")

    recorder = Recorder(clock=looked_at)

    def loop() -> None:
        for _ in range(1000):
            recorder.begin_turn()
            recorder.lap("receive")
            recorder.look()
            recorder.end_turn(1, worked=True)
            recorder.add("track", "name", 1)

    loop()
    before = sys.getallocatedblocks()
    loop()
    assert sys.getallocatedblocks() - before < 100
