"""Random schedules of a node with a page store: workers' tiers, store and disk, with faults at any moment.

Every page that is read holds its own tokens' content, nothing is visible early, nothing is lost, and all requests
finish.
"""

import os
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tandem.pagestore.client import loading, writing
from tests.fakes.page_store.schedule import run_schedule

# A schedule takes about 50 ms.
NUM_SCHEDULES = int(os.environ.get("TANDEM_SCHEDULES", "240"))
NUM_PARTS = 4


@pytest.fixture(autouse=True)
def copies_may_hold_half_of_the_tiny_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "HELD_SHARE", 0.5)
    monkeypatch.setattr(writing, "HELD_SHARE", 0.5)


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


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_new_random_schedules_keep_all_guarantees(part: int) -> None:
    """Long mode, sized by TANDEM_SCHEDULES."""
    explore(random.getrandbits(64), max(NUM_SCHEDULES * 4, 10_000) // NUM_PARTS)


def test_schedules_reach_everything() -> None:
    counts: Counter[str] = Counter()
    for number in range(60):
        counts += run_schedule(random.Random(number).randbytes(400)).counts
    rare = {name: counts[name] for name in EVENTS if counts[name] < 5}
    assert rare == {}


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
