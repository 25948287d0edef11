"""Order of requests in every queue."""

import pytest

from tandem.priority import HEAD_START_S, MAX_STEPS, virtual_arrival_ns

SECOND_NS = 10**9
HEAD_START_NS = int(HEAD_START_S * SECOND_NS)


def test_priority_step_equals_a_wait() -> None:
    assert virtual_arrival_ns(500, 0) == 500
    assert virtual_arrival_ns(500 + 2 * HEAD_START_NS, 2) == virtual_arrival_ns(500, 0)
    assert virtual_arrival_ns(500, -1) == virtual_arrival_ns(500 + HEAD_START_NS, 0)


@pytest.mark.parametrize("sign", [1, -1])
def test_no_priority_is_worth_more_than_the_last_step(sign: int) -> None:
    assert virtual_arrival_ns(0, sign * 2**31) == virtual_arrival_ns(0, sign * MAX_STEPS)


def test_long_waits_outrank_later_requests() -> None:
    lowest = virtual_arrival_ns(0, -(2**31))
    highest_later = virtual_arrival_ns(2 * MAX_STEPS * HEAD_START_NS + 1, 2**31 - 1)
    assert lowest < highest_later
