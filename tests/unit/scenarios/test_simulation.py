"""Random schedules of failures, delays and aborts in a simulated cluster.

No page is lost or written without a lease, each client gets consistent tokens once, and everything comes to rest.
"""

import os
import random

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.fakes.simulation.schedule import run_schedule

# Half run without and half with overlapping forward passes; half of each with workers of one role, half with role both.
NUM_SCHEDULES = int(os.environ.get("TANDEM_SCHEDULES", "128"))
NUM_PARTS = 4
# Of each worker, by part.
NUM_RANKS = (1, 2, 1, 3)
SPECULATES = (False, False, True, True)


def explore(number: int, num_schedules: int, asynchronous: bool, two_way: bool, part: int) -> None:
    """Run the schedules that hypothesis generates from seed `number`; a failing one is minimized."""

    @seed(number)
    @settings(max_examples=num_schedules, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.binary(min_size=150, max_size=500))
    def any_schedule_keeps_every_promise(data: bytes) -> None:
        run_schedule(data, asynchronous, two_way, NUM_RANKS[part], speculates=SPECULATES[part])

    any_schedule_keeps_every_promise()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("two_way", [False, True], ids=["one_role", "both"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_random_schedules_keep_all_guarantees(part: int, asynchronous: bool, two_way: bool) -> None:
    explore(part, NUM_SCHEDULES // 4 // NUM_PARTS, asynchronous, two_way, part)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("two_way", [False, True], ids=["one_role", "both"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_new_random_schedules_keep_all_guarantees(part: int, asynchronous: bool, two_way: bool) -> None:
    """Long mode, sized by TANDEM_SCHEDULES."""
    num_schedules = max(NUM_SCHEDULES * 4, 40_000) // 4 // NUM_PARTS
    explore(random.getrandbits(64), num_schedules, asynchronous, two_way, part)
