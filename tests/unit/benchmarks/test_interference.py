"""The interference benchmark: cells with separate prompts, their figures and their files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import interference
from benchmarks.interference_cells import (
    CLIENT_GAP,
    CLIENT_ITL,
    CLIENT_TTFT,
    DEFAULTS,
    STREAMS_ITL,
    STREAMS_QUIET_ITL,
    Cell,
    bench_configs,
    distributions,
    num_not_whole,
    rows_of,
)
from benchmarks.rows import Row
from tandem.bench.records import RequestRecord
from tandem.bench.results import make_result
from tandem.bench.workloads.table import make_sessions
from tandem.engine.attention.layout import KvHeadLayout
from tests.unit.tandem.bench.records import record
from tests.unit.tandem.bench.test_results import a_run

STEADY = Cell("steady-3", "steady", 256, 4, rate=3.0)
BURST = Cell("burst-64x256", "burst", 256, 16, num_prompts=2)


def a_request(handover_ms: float = 4.0, **more: Any) -> RequestRecord:
    """Due at 2 s, first token at 2.1 s, second 20 ms later, then one every 10 ms."""
    phases = {"handover": handover_ms, "transfer": handover_ms - 1, "first_to_second": handover_ms + 12}
    return record([2.1, 2.12, 2.13, 2.14], due_s=2.0, phases_ms=phases, **more)


def a_stream(gap_s: float = 0.01, until_s: float = 2.0) -> RequestRecord:
    """Gaps of 10 ms before the first arrival, then of `gap_s` until 2.14 s."""
    quiet = [index * 0.01 for index in range(round(until_s * 100) + 1)]
    busy = [until_s + gap_s * index for index in range(1, round(0.14 / gap_s) + 1)]
    return record([*quiet, *busy], group="streams", error="cut")


def test_ledger_and_clients_stand_side_by_side() -> None:
    found = distributions([a_request(), a_request(6.0, index=1), a_stream(0.02)])
    assert found["handover"]["p50"] == pytest.approx(5.0) and found["handover"]["count"] == 2
    assert found[CLIENT_TTFT]["p50"] == pytest.approx(100)
    assert found[CLIENT_GAP]["p50"] == pytest.approx(20)
    assert found[CLIENT_ITL]["max"] == pytest.approx(10)
    assert found[STREAMS_QUIET_ITL]["max"] == pytest.approx(10)
    assert found[STREAMS_ITL]["p50"] == pytest.approx(20)
    assert "lease" not in found


def test_failed_request_is_incomplete_and_not_measured() -> None:
    records = [a_request(), a_request(900.0, error="failed", detail="lost"), a_stream()]
    assert distributions(records)["handover"]["max"] == pytest.approx(4.0)
    assert num_not_whole(records) == 1
    assert interference.problems(interference.described(records, [], [], ["slow"])) == ["failed: lost", "slow"]
    assert num_not_whole([a_request(error="cut")]) == 1
    assert num_not_whole([record([0.1], group="streams", error="failed")]) == 1
    assert not judged(BURST, records)["requests that are whole"].ok


def judged(cell: Cell, records: Sequence[RequestRecord], **known: float) -> dict[str, Row]:
    rows = rows_of(
        cell, records, distributions(records), known.get("own_copy_ms"), lone_ttft_ms=known.get("lone_ttft_ms")
    )
    return {row.name: row for row in rows}


def test_streams_are_judged_by_their_longest_gaps() -> None:
    name = "streams' ITL p99 / p50"
    assert judged(STEADY, [a_request(), a_stream()])[name].ok
    late = a_stream()
    late.times.append(late.times[-1] + 0.015)
    hindered = judged(STEADY, [a_request(ended_s=2.2), late])[name]
    assert hindered.value > 1.2 and not hindered.ok


def test_mixed_prompts_are_judged_by_second_token_and_lone_ttft() -> None:
    records = [a_request(), a_stream()]
    rows = judged(STEADY, records, lone_ttft_ms=99.0)
    assert rows["first_to_second p50"].ok and rows["first_to_second p99"].ok
    assert rows["TTFT p50 / that of lone"].value == pytest.approx(100 / 99) and rows["TTFT p50 / that of lone"].ok
    assert not judged(STEADY, records, lone_ttft_ms=90.0)["TTFT p50 / that of lone"].ok
    assert "TTFT p50 / that of lone" not in judged(STEADY, records)
    rows = judged(STEADY, [a_request(10.0), a_stream()])
    assert not rows["first_to_second p50"].ok and rows["first_to_second p99"].ok
    assert not judged(STEADY, [a_request(19.0), a_stream()])["first_to_second p99"].ok


def test_burst_wait_allowance() -> None:
    for handover_ms, ok in ((16.9, True), (17.1, False)):
        records = [a_request(handover_ms), a_request(handover_ms)]
        row = judged(BURST, records, own_copy_ms=2.0)["handover p99 beyond its own copy"]
        # Steps take 10 ms here.
        assert row.value == pytest.approx(handover_ms - 2.0) and row.high == pytest.approx(15.0) and row.ok is ok


def test_prompt_copy_covers_all_pages() -> None:
    layout = KvHeadLayout(32, 16, 8, 128, "bfloat16")
    assert layout.page_bytes == 2 * 2**20
    assert interference.own_copy_ms(layout, 513, 375.0) == pytest.approx(33 * 2 * 2**20 / 375e9 * 1e3)


def test_prompts_differ_between_runs_and_repeat_between_calls() -> None:
    sizes = DEFAULTS["cpu"]

    def prompts() -> list[bytes]:
        found = []
        for cell in sizes.cells:
            for config in bench_configs(cell, sizes, "a:1", 8000, 10.0):
                sessions = make_sessions(config.workload, config.arrivals, config.duration_s)
                found += [(turn.parts[0].token_ids or b"").tobytes() for s in sessions for turn in s.turns]  # type: ignore[union-attr]
        return found

    first = prompts()
    # Not even their first page.
    assert len({prompt[:64] for prompt in first}) == len(first)
    assert prompts() == first


def test_a_burst_leaves_at_one_moment() -> None:
    (config,) = bench_configs(BURST, DEFAULTS["cuda"], "a:1", 8000, 10.0)[:1]
    sessions = make_sessions(config.workload, config.arrivals, config.duration_s)
    assert [session.due_s for session in sessions] == [0.0, 0.0]


def test_cell_names_match_their_sizes() -> None:
    cells = {cell.name: cell for cell in DEFAULTS["cuda"].cells}
    assert cells.keys() == {cell.name for cell in DEFAULTS["cpu"].cells}
    for num_prompts in (64, 256):
        for num_tokens in (256, 512):
            cell = cells[f"burst-{num_prompts}x{num_tokens}"]
            assert (cell.num_prompts, cell.input_tokens, cell.num_runs) == (num_prompts, num_tokens, 3)
    assert (cells["steady-6"].rate, cells["lone"].num_prompts, cells["long-32k"].input_tokens) == (6.0, 20, 32_000)


def test_flags_of_serve_stand_behind_two_dashes() -> None:
    given = interference.parse_arguments(["--out", "x", "--cells", "lone", "--", "--chunk-size", "64"])
    assert given.serve == ["--chunk-size", "64"] and list(given.cells) == ["lone"]
    assert interference.parse_arguments(["--out", "x"]).serve == []


class FakeServed:
    address, ready_s, lines = "a:1", 1.0, ("up",)

    def __init__(self, flags: Sequence[str], *_: object) -> None:
        self.flags = list(flags)

    def __enter__(self) -> "FakeServed":
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[RequestRecord]]:
    """Results of cells by name; other cells time out."""
    gives: dict[str, list[RequestRecord]] = {}

    def run_cell(cell: Cell, *_: object) -> Any:
        if cell.name not in gives:
            raise TimeoutError("not over within 1 s")
        records = gives[cell.name]
        return [make_result(*a_run(label=cell.name, records=records))], records

    monkeypatch.setattr(interference, "Served", FakeServed)
    monkeypatch.setattr(interference, "warm_up", lambda *_: None)
    monkeypatch.setattr(interference, "layout_of", lambda flags: KvHeadLayout(2, 16, 2, 16, "float32"))
    monkeypatch.setattr(interference, "run_cell", run_cell)
    return gives


def run(out: Path, *more: str) -> tuple[int, dict[str, Any]]:
    status = interference.main(["--out", str(out), "--cells", "lone", "steady-3", *more])
    return status, json.loads((out / "summary.json").read_text())


def test_complete_requests_in_all_cells_are_success(tmp_path: Path, measured: dict[str, Any]) -> None:
    measured.update({"lone": [a_request()], "steady-3": [a_request(), a_stream()]})
    status, summary = run(tmp_path)
    assert status == 0
    rows = {row["name"]: row for row in summary["cells"]["steady-3"]["rows"]}
    assert rows["TTFT p50 / that of lone"]["value"] == pytest.approx(1.0) and rows["TTFT p50 / that of lone"]["ok"]
    described = json.loads((tmp_path / "lone.json").read_text())
    assert described["ms"]["handover"]["p50"] == pytest.approx(4.0) and described["cell"]["name"] == "lone"
    assert "handover" in (tmp_path / "lone.txt").read_text() and (tmp_path / "steady-3.jsonl").exists()


def test_incomplete_request_is_no_success(tmp_path: Path, measured: dict[str, Any]) -> None:
    measured.update({"lone": [a_request()], "steady-3": [a_request(), a_request(error="timeout"), a_stream()]})
    status, summary = run(tmp_path)
    assert status == 1 and summary["cells"]["steady-3"]["num_not_whole"] == 1


def test_failed_cell_is_reported_and_others_continue(tmp_path: Path, measured: dict[str, Any]) -> None:
    (tmp_path / "lone.json").write_text("of an earlier run")
    measured.update({"steady-3": [a_request(), a_stream()]})
    status, summary = run(tmp_path)
    assert status == 1 and "not over" in summary["cells"]["lone"]["failed"]
    assert any("lone" in warning for warning in summary["cells"]["steady-3"]["warnings"])
    assert summary["cells"]["steady-3"]["num_not_whole"] == 0 and not (tmp_path / "lone.json").exists()


def test_cell_without_time_is_reported_as_skipped(
    tmp_path: Path, measured: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    measured.update({"lone": [a_request()], "steady-3": [a_request(), a_stream()]})
    # Enough for the first, which takes 15 s, but not for the second.
    status, summary = run(tmp_path, "--limit", "18")
    assert status == 1 and "left_out" in summary["cells"]["steady-3"]
    assert "steady-3: left out" in capsys.readouterr().err
    assert summary["cells"]["lone"]["num_not_whole"] == 0
