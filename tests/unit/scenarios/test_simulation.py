"""Whatever dies, is delayed, cut off, stopped or cancelled, whenever: no page is lost or written by a stranger, every
client gets tokens that follow from those that it has, each once, and everything comes to rest."""

import os
import random

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.fakes.simulation.schedule import run_schedule

# Half of them plain, half with overlapping forwards; and of each, half with workers of one role, half with workers that
# do both.
NUM_SCHEDULES = int(os.environ.get("TANDEM_SCHEDULES", "400"))
NUM_PARTS = 4


def explore(number: int, num_schedules: int, asynchronous: bool, two_way: bool) -> None:
    """Runs schedules that hypothesis makes up, the same ones for the same number; a failing one is cut down to its
    essence."""

    @seed(number)
    @settings(max_examples=num_schedules, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.binary(min_size=150, max_size=500))
    def any_schedule_keeps_every_promise(data: bytes) -> None:
        run_schedule(data, asynchronous, two_way)

    any_schedule_keeps_every_promise()


# In parts, so that they run side by side.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("two_way", [False, True], ids=["one_role", "both"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_any_schedule_keeps_every_promise(part: int, asynchronous: bool, two_way: bool) -> None:
    explore(part, NUM_SCHEDULES // 4 // NUM_PARTS, asynchronous, two_way)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("two_way", [False, True], ids=["one_role", "both"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_many_schedules_never_run_before(part: int, asynchronous: bool, two_way: bool) -> None:
    """The long mode; TANDEM_SCHEDULES says how many."""
    explore(random.getrandbits(64), max(NUM_SCHEDULES * 4, 40_000) // 4 // NUM_PARTS, asynchronous, two_way)
