"""Injected bugs of workers with several ranks: the simulation must detect each of them."""

import random
from typing import Any

import pytest

from tandem.engine.launch_list import LaunchList
from tests.fakes.engine import FakeForwardOutput
from tests.fakes.ranked_engine import RankedEngine, RankedOutput
from tests.fakes.simulation.schedule import run_schedule

NUM_SCHEDULES = 1000


def find_violation(asynchronous: bool, num_ranks: int = 2, first: int = 0) -> str:
    for number in range(first, first + NUM_SCHEDULES):
        try:
            run_schedule(random.Random(number).randbytes(400), asynchronous, num_ranks=num_ranks)
        except (AssertionError, RuntimeError, ValueError) as error:
            return str(error) or repr(error)
    return ""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_page_that_a_slow_rank_still_writes_is_caught(monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    """The leader alone counts: it frees the page of a prompt that is given up, and another request gets it."""
    monkeypatch.setattr(RankedOutput, "done", FakeForwardOutput.done)
    assert find_violation(asynchronous)


@pytest.mark.parametrize(("ignored", "first"), [(0, 23), (1, 186)])
def test_each_follower_counts(monkeypatch: pytest.MonkeyPatch, ignored: int, first: int) -> None:
    """The slowest of the others is not enough, whichever follower lags behind it."""

    def slowest_of_others(self: RankedEngine) -> int:
        return min(posted for follower, posted in enumerate(self._posted) if follower != ignored)

    monkeypatch.setattr(RankedEngine, "num_completed", slowest_of_others)
    assert find_violation(asynchronous=False, num_ranks=3, first=first)


@pytest.mark.parametrize(("method", "first"), [("using", 36), ("num_ready", 45)])
def test_a_forward_pass_forgotten_once_it_is_collected_is_caught(
    monkeypatch: pytest.MonkeyPatch, method: str, first: int
) -> None:
    original = getattr(LaunchList, method)

    def forget(self: LaunchList, argument: Any) -> Any:
        collected = self._collected.copy()
        self._collected.clear()
        try:
            return original(self, argument)
        finally:
            self._collected.extend(collected)

    monkeypatch.setattr(LaunchList, method, forget)
    assert find_violation(asynchronous=False, first=first)
