"""Runs and sweeps, from a configuration to files."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tandem.bench.arrivals import ArrivalConfig
from tandem.bench.clients.base import EndpointConfig
from tandem.bench.command import Outputs, plot_gaps, run_once, run_sweep
from tandem.bench.config import BenchConfig, WorkloadConfig
from tandem.bench.goodput import Slo
from tandem.bench.results import make_result, read_result, write_result
from tandem.bench.sweep import SweepConfig
from tandem.bench.workloads.synthetic import Lengths
from tests.unit.tandem.bench.conftest import ScriptedServers
from tests.unit.tandem.bench.records import record
from tests.unit.tandem.bench.scripted_server import Script
from tests.unit.tandem.bench.test_results import a_run

FAST = Script(ttft_s=0.01, gaps_s=(0.002,), is_exact=False)


def quiet() -> Console:
    return Console(file=StringIO())


def config(url: str, kind: str = "synthetic", **options: object) -> BenchConfig:
    arrivals = ArrivalConfig("constant", 20.0)
    workload = WorkloadConfig(
        kind=kind,  # type: ignore[arg-type]
        num_requests=6,
        input_lengths=Lengths(8, 8),
        output_lengths=Lengths(4, 4),
        num_streams=2,
        lead_s=0.2,
        num_turns=2,
    )
    return BenchConfig(EndpointConfig(url), workload, arrivals, **options)  # type: ignore[arg-type]


def test_steady_streams_are_measured_beside_arrivals(scripted: ScriptedServers, tmp_path: Path) -> None:
    outputs = Outputs(result=tmp_path / "run.json", requests=tmp_path / "requests.jsonl")
    result = run_once(config(scripted(FAST).http, "steady-streams"), outputs, quiet())
    assert result["requests"]["num_whole"] == 6 and result["streams"]["num_requests"] >= 2
    assert result["streams"]["itl"]["p50"] < 0.05
    assert read_result(tmp_path / "run.json")["requests"] == json.loads(json.dumps(result["requests"]))
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert {line["group"] for line in lines} == {"requests", "streams"}
    assert min(line["due_s"] for line in lines if line["group"] == "requests") == pytest.approx(0.2)


def test_turns_are_counted_as_requests(scripted: ScriptedServers) -> None:
    assert run_once(config(scripted(FAST).grpc, "multi-turn"), Outputs(), quiet())["requests"]["num_whole"] == 12


def test_sweep_ends_below_the_goodput_limit(scripted: ScriptedServers, tmp_path: Path) -> None:
    """Each run has other prompts, and the result includes all runs."""
    url, outputs = scripted(FAST).grpc, Outputs(result=tmp_path / "sweep.json")
    good = config(url, slo=Slo.parse("e2e=20s"))
    result = run_sweep(good, SweepConfig("rate", 20, 40), 0.9, outputs, quiet())
    assert result["sweep"]["highest"] == 40
    assert [trial["value"] for trial in read_result(tmp_path / "sweep.json")["sweep"]["trials"]] == [20, 40]
    seeds = [trial["result"]["config"]["workload"]["seed"] for trial in result["sweep"]["trials"]]
    assert seeds == [0, 1]
    bad = config(url, slo=Slo.parse("e2e=1ms"))
    assert run_sweep(bad, SweepConfig("rate", 20, 40), 0.9, Outputs(), quiet())["sweep"]["highest"] is None


def test_unwritable_files_are_found_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no directory"):
        run_once(config("grpc://127.0.0.1:1"), Outputs(result=tmp_path / "absent" / "run.json"), quiet())


def test_a_plot_of_runs_without_gaps_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `bench` has it")
    write_result(make_result(*a_run(records=[record([1.0])])), tmp_path / "run.json")
    with pytest.raises(ValueError, match="none of these runs has a gap"):
        plot_gaps([tmp_path / "run.json"], tmp_path / "itl.png")
    write_result(make_result(*a_run()), tmp_path / "run.json")
    plot_gaps([tmp_path / "run.json"], tmp_path / "itl.png")
    assert (tmp_path / "itl.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["result", "requests", "report"])
def test_unwritable_file_is_found_before_the_run(tmp_path: Path, name: str) -> None:
    for file in (tmp_path, Path("/proc/bench.json")):
        with pytest.raises(ValueError, match="cannot be written"):
            run_once(config("grpc://127.0.0.1:1"), Outputs(**{name: file}), quiet())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="no directory"):
        run_once(config("grpc://127.0.0.1:1"), Outputs(plots=tmp_path / "file"), quiet())
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_writable_results_survive_an_unwritable_file(scripted: ScriptedServers, tmp_path: Path) -> None:
    outputs = Outputs(result=tmp_path / "run.json", requests=Path("/dev/full"))
    with pytest.raises(OSError, match="/dev/full cannot be written: No space left"):
        run_once(config(scripted(FAST).http), outputs, quiet())
    assert read_result(tmp_path / "run.json")["requests"]["num_whole"] == 6


def test_a_sweep_has_no_file_of_requests(tmp_path: Path) -> None:
    good = config("grpc://127.0.0.1:1", slo=Slo.parse("e2e=20s"))
    with pytest.raises(ValueError, match="--requests-out"):
        run_sweep(good, SweepConfig("rate", 1, 2), 0.9, Outputs(requests=tmp_path / "r.jsonl"), quiet())
