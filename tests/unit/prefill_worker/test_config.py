import pytest

from tandem.prefill_worker.config import PrefillConfig
from tandem.prefill_worker.policies.table import PREFILL_POLICIES


@pytest.mark.parametrize("name", ["chunk_size", "min_shared_tokens", "grant_timeout_s"])
def test_sizes_and_times_are_above_0(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be above 0, not 0"):
        PrefillConfig(**{name: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", PREFILL_POLICIES.names)
def test_every_policy_may_be_named(schedule: str) -> None:
    assert PrefillConfig(schedule=schedule).schedule == schedule


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="`schedule` must be one of fcfs, lpm"):
        PrefillConfig(schedule="best")
