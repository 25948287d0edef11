"""`tandem estimate --trace`."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.deploy.cli.main import main
from tests.unit.deploy.cli.test_estimate_command import CONFIG

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def azure_trace(folder: Path, per_minute: list[int]) -> str:
    """Writes a trace with prompts of 4,096 and outputs of 256 tokens."""
    rows = [
        f"2023-11-16 {18 + minute // 60}:{minute % 60:02}:{60 * number / count:010.7f},4096,256\n"
        for minute, count in enumerate(per_minute)
        for number in range(count)
    ]
    (folder / "trace.csv").write_text(AZURE + "".join(rows))
    return str(folder / "trace.csv")


def bounds(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["estimate", "--gpu", "h200", "--slo", "ttft=500ms,itl=25ms", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)["bounds"]


def test_bounds_of_a_rising_and_falling_load(
    model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = azure_trace(tmp_path, [60] * 40 + [800] * 30 + [60] * 40)
    flags = ["--model", model_dir, "--workload", "azure", "--trace", trace]
    found = bounds(capsys, *flags)
    assert found["requests"] == 28_800 and found["windows"] == 110
    assert (found["least_workers"], found["most_workers"]) == (1, 3)
    assert (found["workers"]["low"], found["workers"]["high"]) == (1, 3)
    assert found["workers"]["gpu_hours"] < 0.7 * found["fixed"]["gpu_hours"]
    slower = bounds(capsys, *flags, "--start-time", "15m", "--time-scale", "0.99")
    assert slower["workers"]["gpu_hours"] > found["workers"]["gpu_hours"]


def test_gpu_hours_are_those_of_all_ranks(model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = azure_trace(tmp_path, [60] * 20)
    found = bounds(capsys, "--model", model_dir, "--workload", "azure", "--trace", trace, "--tp", "2")
    assert found["workers"]["gpu_hours"] == pytest.approx(2 * found["workers"]["worker_s"] / 3600)


def test_what_a_person_reads(model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"timestamp": 1000 * at, "input_length": 6000, "output_length": 100, "hash_ids": [1, 2]} for at in range(90)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    assert (
        main(["estimate", "--model", model_dir, "--gpu", "h200", "--workload", "mooncake", "--trace", str(trace)]) == 0
    )
    told = capsys.readouterr().out
    for line in (
        "prefill of 6,000 tokens",
        "trace: 90 requests in 2 minutes",
        "--workers 1:1 takes",
        "--workers 1, the fewest fixed, takes",
    ):
        assert line in told


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workload", "azure"], "the workload 'azure' needs a trace (--trace FILE)"),
        (["--workload", "100/10", "--trace", "TRACE"], "a trace is for the workloads mooncake and azure (--workload)"),
        (["--workload", "azure", "--trace", "missing.csv"], "the trace missing.csv cannot be read: No such file"),
        (["--workload", "mooncake", "--trace", "TRACE"], "line 1 is not of a Mooncake trace"),
        (["--workload", "azure", "--trace", "BAD"], "line 3 is not of an Azure trace"),
        (["--workload", "azure", "--trace", "TRACE", "--gpus", "2"], "leave out --gpus and --rate"),
        (["--workload", "azure", "--trace", "TRACE", "--prefill-tp", "2"], "give --tp"),
        (["--workload", "azure", "--trace", "TRACE", "--start-time", "120m"], "--start-time must be at most 60m"),
        (["--workload", "azure", "--trace", "TRACE", "--slo", "ttft=1ms"], "--slo is too strict for any"),
        (["--workload", "azure", "--trace", "LONG"], "a request of 200001 tokens is longer than the model allows"),
    ],
)
def test_bad_requests_are_one_line(
    flags: list[str], message: str, model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, long = tmp_path / "bad.csv", tmp_path / "long.csv"
    bad.write_text(AZURE + "2023-11-16 18:00:00,1,1\n2023-11-16 18:00:00,many,1\n")
    long.write_text(AZURE + "2023-11-16 18:00:00,200000,1\n")
    files = {"TRACE": azure_trace(tmp_path, [60, 60]), "BAD": str(bad), "LONG": str(long)}
    flags = [files.get(flag, flag) for flag in flags]
    assert main(["estimate", "--model", model_dir, "--gpu", "h200", *flags]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1
