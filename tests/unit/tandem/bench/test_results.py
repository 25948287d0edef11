"""Results can be read back and contain no secrets."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.bench.arrivals import ArrivalConfig
from tandem.bench.clients.base import EndpointConfig, ServerDescription
from tandem.bench.config import BenchConfig, WorkloadConfig
from tandem.bench.goodput import Slo
from tandem.bench.processes import ClientUsage, RunResult
from tandem.bench.records import RequestRecord
from tandem.bench.results import make_result, read_result, write_records, write_result
from tests.unit.tandem.bench.records import record


def a_run(**options: Any) -> tuple[BenchConfig, RunResult]:
    endpoint = EndpointConfig("grpc://host:1", api_key="secret-key", headers=(("x-key", "secret-value"),))
    config = BenchConfig(endpoint, slo=Slo.parse("ttft=1s"), label=options.pop("label", ""))
    records = [record([0.5, 0.6, 0.8]), record([2.0, 2.1], index=1)]
    usages = [ClientUsage(0.5, 2.0, [0.001, 0.002])]
    return config, RunResult(ServerDescription("m", "v"), 0.0, options.pop("records", records), usages, **options)


def test_result_round_trips(tmp_path: Path) -> None:
    result = make_result(*a_run())
    file = tmp_path / "run.json"
    write_result(result, file)
    assert read_result(file) == json.loads(json.dumps(result))
    assert "secret" not in file.read_text()
    assert result["label"] == "grpc://host:1" and result["goodput"]["num_good"] == 1
    assert result["client"]["cpu_share"] == 0.25 and result["client"]["chunks_per_cpu_s"] == 10


def test_streams_are_reported_apart() -> None:
    streams = [record([0.1, 0.2, 0.4, 3.0], group="streams", error="cut")]
    result = make_result(*a_run(records=[record([0.5, 0.6], due_s=0.3), *streams]))
    assert result["requests"]["num_requests"] == 1 and result["requests"]["itl"]["max"] == pytest.approx(0.1)
    assert result["streams"]["itl"]["max"] == pytest.approx(0.2)
    assert result["series"]["arrivals_s"] == [0.3]
    series = result["series"]["itl"]
    assert sum(series["count"]) == 3 and max(series["max"]) == pytest.approx(2.6)
    assert series["at_s"] == sorted(series["at_s"])


def test_requests_are_written_in_order_of_their_leaving(tmp_path: Path) -> None:
    one, other = record([5.25], index=0, due_s=5.0), record([1.5, 1.75], index=1, due_s=1.0, error="failed", detail="x")
    write_records([one, other], tmp_path / "requests.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == [1, 0]
    assert lines[0]["times_s"] == [1.5, 1.75] and lines[0]["counts"] == [1, 1] and lines[0]["error"] == "failed"
    assert lines[1]["due_s"] == 5.0


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99, "requests": {}}'])
def test_malformed_result_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json"):
        read_result(tmp_path / "x.json")
    with pytest.raises(ValueError, match="cannot be read"):
        read_result(tmp_path / "absent.json")


def test_a_run_without_a_whole_request_has_a_result() -> None:
    records: list[RequestRecord] = [record([], error="refused", detail="no")]
    result = make_result(*a_run(records=records))
    assert result["requests"]["ttft"] is None and result["series"]["itl"] is None
    assert result["warnings"] == ["1 requests: refused (such as: no)"]


def test_contradictory_configurations_are_refused() -> None:
    endpoint = EndpointConfig("grpc://host:1")
    for workload, arrivals in (
        (WorkloadConfig(kind="steady-streams"), ArrivalConfig()),
        (WorkloadConfig(), None),
    ):
        with pytest.raises(ValueError):
            BenchConfig(endpoint, workload, arrivals)
    with pytest.raises(ValueError, match="prompt-as text"):
        BenchConfig(EndpointConfig("http://h/v1", api="chat"))
    with pytest.raises(ValueError, match="--trace"):
        WorkloadConfig(kind="azure")


@pytest.mark.parametrize(
    "options",
    [
        {"workload": WorkloadConfig(num_requests=5), "warmup_requests": 5},
        {"duration_s": 5.0, "workload": WorkloadConfig(num_requests=5), "warmup_s": 5.0},
    ],
)
def test_empty_runs_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--warmup"):
        BenchConfig(EndpointConfig("grpc://host:1"), **options)
    with pytest.raises(ValueError, match="time scale"):
        WorkloadConfig(kind="azure", trace=Path("x"), time_scale=float("nan"))
