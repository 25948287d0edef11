"""What all scenarios have in common."""

import pytest

from tandem.prefill_worker import scheduler


@pytest.fixture(autouse=True)
def handovers_go_on_at_every_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that a test moves stands still within a step, and would leave a worker one chance in each."""
    monkeypatch.setattr(scheduler, "TELL_S", 0.0)
