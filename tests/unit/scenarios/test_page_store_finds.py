"""Injected bugs: the simulation of the page store must detect each of them in one of its schedules."""

import random

import pytest

from tandem.pagestore.client import loading, writing
from tests.fakes.page_store.faults import FAULTS
from tests.fakes.page_store.schedule import run_schedule

NUM_SCHEDULES = 300


@pytest.fixture(autouse=True)
def copies_may_hold_half_of_the_tiny_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "HELD_SHARE", 0.5)
    monkeypatch.setattr(writing, "HELD_SHARE", 0.5)


def find_violation(first: int) -> str:
    """Run random schedules until one fails; return its message. The parts' own books are not checked."""
    for number in range(first, first + NUM_SCHEDULES):
        try:
            run_schedule(random.Random(number).randbytes(400), is_recounted=False)
        except AssertionError as error:
            return str(error) or repr(error)
    return ""


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    found = find_violation(fault.first)
    assert found and fault.message in found, found
