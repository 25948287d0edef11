import pytest

from tandem.decode_worker.config import DecodeConfig


@pytest.mark.parametrize("name", ["max_batch_size", "lease_duration_s", "admit_grace_s"])
def test_sizes_and_times_are_above_0(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be above 0, not 0"):
        DecodeConfig(**{name: 0})  # type: ignore[arg-type]
