"""A recording beside a benchmark: its file is whole or says what is missing, and nobody waits for ever."""

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recorded
from benchmarks.recorded import Recording, from_later, write_within
from tandem.client import TandemError
from tandem.recording import ENGINE
from tandem.v1 import recording_pb2 as pb


def read_trace(file: Path) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(gzip.decompress(file.read_bytes()))
    return trace


def a_trace(num_events: int) -> dict[str, Any]:
    rng = random.Random(0)
    named = {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "p"}}
    return {
        "traceEvents": [named] + [{"ph": "X", "ts": float(i), "x": rng.random()} for i in range(num_events)],
        "otherData": {"started_ns": "5"},
    }


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "a.trace.json.gz"
    assert write_within(a_trace(50), file, 10**6) == []
    assert read_trace(file) == a_trace(50)


def test_of_a_trace_that_is_too_large_the_end_is_kept_and_that_is_told(tmp_path: Path) -> None:
    file = tmp_path / "a.trace.json.gz"
    (warning,) = write_within(a_trace(4000), file, 8000)
    assert file.stat().st_size <= 8000
    events = read_trace(file)["traceEvents"]
    assert events[0]["ph"] == "M" and events[-1]["ts"] == 3999.0
    assert f"begins {events[1]['ts'] / 1e6:.2f} s" in warning
    assert read_trace(file)["otherData"]["cut_us"] == events[1]["ts"]


def test_what_is_left_out_is_about_the_share_that_was_asked_for() -> None:
    cut, cut_us = from_later(a_trace(1000), 0.25)
    assert len(cut["traceEvents"]) == pytest.approx(250, abs=2) and cut_us == pytest.approx(750, abs=2)


class FakeClient:
    error: TandemError | None = None

    def __init__(self, address: str) -> None: ...

    def __enter__(self) -> "FakeClient":
        return self

    def __exit__(self, *_: object) -> None: ...

    def record(self, seconds: float) -> Iterator[pb.RecordedPart]:
        if self.error:
            raise self.error
        kept = pb.RecordedSlice(track=ENGINE, name="launch", start_ns=5_000, duration_ns=2_000)
        yield pb.RecordedPart(process="prefill-0", role="prefill", slices=[kept])


def test_a_recording_is_written_when_the_cell_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "TandemClient", FakeClient)
    file = tmp_path / "a.trace.json.gz"
    recording = Recording("a:1", 0.0, 0.1)
    recording._thread.join(5.0)
    assert recording.finish(file) == []
    assert "launch" in json.dumps(read_trace(file))


def test_why_there_is_no_recording_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "TandemClient", FakeClient)
    file = tmp_path / "a.trace.json.gz"
    # The cell has ended before.
    assert Recording("a:1", 600.0, 1.0).finish(file) == ["what was to be recorded had ended before"]
    monkeypatch.setattr(FakeClient, "error", TandemError("RESOURCE_EXHAUSTED", "refused"))
    recording = Recording("a:1", 0.0, 0.1)
    recording._thread.join(5.0)
    assert "refused" in recording.finish(file)[0]
    assert not list(tmp_path.iterdir())
