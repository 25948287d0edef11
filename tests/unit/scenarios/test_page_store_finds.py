"""Injected bugs: the simulation of the page store must detect each of them in one of its schedules."""

import random
from pathlib import Path

import pytest

from tests.fakes.page_store.faults import FAULTS, Fault
from tests.fakes.page_store.schedule import STORMY, run_schedule

NUM_SCHEDULES = 300


def is_found(fault: Fault, folder: Path) -> bool:
    """Run random schedules until one ends with the fault's violation. The parts' own books are not checked.

    A fault may first end other schedules in other ways.
    """
    for number in range(fault.first, fault.first + NUM_SCHEDULES):
        data = STORMY + random.Random(number).randbytes(400)
        try:
            run_schedule(data, is_recounted=False, folder=folder / str(number) if fault.on_disk else None)
        except Exception as error:
            if isinstance(error, AssertionError) and fault.message in str(error):
                return True
    return False


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FAULTS[name].plant(monkeypatch)
    assert is_found(FAULTS[name], tmp_path)
