import pytest

from tandem.prefill_worker import scheduler


@pytest.fixture(autouse=True)
def handovers_go_on_at_every_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake clock stands still within a step, so a worker would get only one chance per step."""
    monkeypatch.setattr(scheduler, "TELL_S", 0.0)
