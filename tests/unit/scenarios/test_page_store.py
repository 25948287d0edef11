"""Random schedules of a node with a page store: workers' tiers, store and disk, with faults at any moment.

Every page that is read holds its own tokens' content, nothing is visible early, nothing is lost, and all requests
finish.
"""

import os
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.fakes.page_store.schedule import run_schedule

NUM_SCHEDULES = int(os.environ.get("TANDEM_SCHEDULES", "96"))
NUM_PARTS = 4
# Events that many schedules must have had.
EVENTS = (
    "finished",
    "given back",
    "growth waits",
    "copied out",
    "copied in",
    "tokens hit in host",
    "tokens hit on disk",
    "written to disk",
    "read from disk",
    "resets completed",
    "streams cut",
    "worker deaths",
    "store deaths",
)


def explore(number: int, num_schedules: int) -> None:
    """Run the schedules that hypothesis generates from seed `number`; a failing one is minimized."""

    @seed(number)
    @settings(max_examples=num_schedules, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.binary(min_size=150, max_size=500))
    def any_schedule_keeps_every_promise(data: bytes) -> None:
        run_schedule(data)

    any_schedule_keeps_every_promise()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_random_schedules_keep_all_guarantees(part: int) -> None:
    explore(part, NUM_SCHEDULES // NUM_PARTS)


def test_schedules_with_a_folder_keep_all_guarantees(tmp_path: Path) -> None:
    """The disk tier's own threads read and write files, some of which are damaged."""
    for number in range(10):
        run_schedule(random.Random(number).randbytes(400), folder=tmp_path / str(number))


def test_schedules_reach_everything() -> None:
    counts: Counter[str] = Counter()
    for number in range(30):
        counts += run_schedule(random.Random(number).randbytes(400)).counts
    assert {name: counts[name] for name in EVENTS if counts[name] < 5} == {}


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_new_random_schedules_keep_all_guarantees(part: int) -> None:
    """Long mode, sized by TANDEM_SCHEDULES."""
    explore(random.getrandbits(64), max(NUM_SCHEDULES * 4, 20_000) // NUM_PARTS)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_new_schedules_with_a_folder_keep_all_guarantees(tmp_path: Path) -> None:
    first = random.getrandbits(32)
    for number in range(first, first + max(NUM_SCHEDULES, 1000)):
        run_schedule(random.Random(number).randbytes(400), folder=tmp_path / str(number))
