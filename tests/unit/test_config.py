"""Configuration is checked where it is made."""

from pathlib import Path

import pytest

from tandem.cli import main
from tandem.cluster_config import ClusterConfig
from tandem.config import DecodeConfig, EngineConfig, PrefillConfig, RouterConfig, WorkerConfig
from tandem.lifecycle import PHASES, RECEIVED, phase_timings


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EngineConfig("m", dtype="int8"), "dtype must be one of float32, bfloat16, not 'int8'"),
        (lambda: EngineConfig("m", device="tpu"), "device must be one of"),
        (lambda: EngineConfig("m", page_size=0), "page_size must be above 0, not 0"),
        (lambda: EngineConfig("m", num_threads=-1), "num_threads must not be negative"),
        (lambda: PrefillConfig(chunk_size=0), "chunk_size must be above 0"),
        (lambda: DecodeConfig(max_batch_size=-2), "max_batch_size must be above 0"),
        (lambda: RouterConfig("m", "m", 10, grpc_port=70000), "grpc_port must be between 0 and 65535"),
        (lambda: WorkerConfig("w", "router", EngineConfig("m"), "f", 10), "role must be one of"),  # type: ignore[arg-type]
        (lambda: ClusterConfig("m", num_prefill=2, num_decode=0), "both kinds are needed"),
        (lambda: ClusterConfig("m", num_prefill=0, num_decode=0), "at least one worker is needed"),
        (lambda: ClusterConfig("m", num_both=-1), "num_both must not be negative"),
        (lambda: ClusterConfig("m", dtype="int4"), "dtype must be one of"),
        (lambda: ClusterConfig("m", grpc_port=99999), "grpc_port must be between"),
    ],
)
def test_nonsense_is_refused_by_name(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "m", "--page-size", "0"], "--page-size must be above 0"),
        (["--model", "m", "--prefill", "1", "--decode", "0"], "both kinds are needed"),
        (["--model", "m", "--chunk-size", "-5"], "--chunk-size must be above 0"),
        (["--model", "m", "--dtype", "int4"], "invalid choice: 'int4'"),
        ([], "which model? give --model"),
    ],
)
def test_a_wrong_call_exits_with_2_and_says_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["serve", *arguments])
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    assert message in capsys.readouterr().err


def test_phases_are_made_of_moments_that_happened() -> None:
    moments = {RECEIVED: 1_000_000, "tokenized": 3_000_000, "first_token": 10_000_000, "second_token": 12_500_000}
    assert phase_timings(moments) == [("tokenize", 0.0, 2.0), ("first_to_second", 9.0, 2.5)]
    assert len({p.name for p in PHASES}) == len(PHASES)


def test_every_phase_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs/architecture.md").read_text()
    for phase in PHASES:
        assert f"`{phase.name}`" in text
