"""A sweep finds the highest rate in few runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.sweep import RESOLUTION, SweepConfig, SweepResult, Trial, sweep


def run_sweep(config: SweepConfig, limit: float) -> SweepResult:
    """Every request is good up to the limit, none beyond."""
    found = SweepResult()
    sweep(config, 0.9, lambda value, _: Trial(value, 1.0 if value <= limit else 0.0, {}), found)
    return found


@given(st.floats(1, 64))
def test_a_rate_is_found_to_the_resolution(limit: float) -> None:
    found = run_sweep(SweepConfig("rate", 1, 64), limit)
    assert found.highest is not None
    assert found.highest <= limit <= found.highest / (1 - RESOLUTION) + 1e-9
    assert len(found.trials) < 15


@given(st.integers(1, 100))
def test_a_concurrency_is_found_exactly(limit: int) -> None:
    found = run_sweep(SweepConfig("concurrency", 1, 100), limit)
    assert found.highest == limit
    assert len({trial.value for trial in found.trials}) == len(found.trials)


def test_both_ends() -> None:
    assert run_sweep(SweepConfig("rate", 2, 20), 1.0).highest is None
    whole = run_sweep(SweepConfig("rate", 2, 20), 99)
    assert whole.highest == 20 and [trial.value for trial in whole.trials] == [2, 4, 8, 16, 20]


@pytest.mark.parametrize("text", ["rate", "rate=1", "rate=0..5", "rate=5..1", "speed=1..2", "concurrency=1..2.5"])
def test_malformed_sweep_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        SweepConfig.parse(text)


def test_sweeps_are_read() -> None:
    assert SweepConfig.parse("rate=0.5..20") == SweepConfig("rate", 0.5, 20.0)
    assert SweepConfig.parse("concurrency=1..64") == SweepConfig("concurrency", 1.0, 64.0)
