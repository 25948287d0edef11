"""How fast workers are, from what they say of requests anyway."""

from dataclasses import dataclass, field

import pytest

from router.rates import SharedRates, WorkerRates
from tandem.lifecycle import DECODE_STARTED, FIRST_TOKEN


@dataclass
class Finished:
    moments: dict[str, int] = field(default_factory=dict)
    num_pages_shipped: int = 0
    output_ids: list[int] = field(default_factory=list)


def new_rates() -> WorkerRates:
    return WorkerRates("cpu", SharedRates("cpu"))


def ns(seconds: float) -> int:
    return int(1e9 * seconds)


def test_prompts_that_follow_each_other_take_the_time_since_the_one_before() -> None:
    rates, now = new_rates(), 0.0
    for number in range(500):
        num_tokens = 100 + 900 * (number % 2)
        now += 0.01 + 1e-3 * num_tokens
        # All began at once, which says nothing of how long each took.
        rates.prompt_computed(num_tokens, 0, ns(now))
    assert rates.prompt_s == pytest.approx((0.01, 1e-3), rel=0.1)


def test_prompts_of_one_forward_are_added_up() -> None:
    rates, now = new_rates(), 0.0
    for number in range(500):
        size = 1 + 7 * (number % 2)
        began, now = now, now + 0.01 + 1e-3 * 100 * size
        for _ in range(size):
            rates.prompt_computed(100, ns(began), ns(now))
    assert rates.prompt_s == pytest.approx((0.01, 1e-3), rel=0.1)


def test_an_idle_worker_does_not_seem_slow() -> None:
    rates = new_rates()
    for number in range(500):
        rates.prompt_computed(1000, ns(100.0 * number), ns(100.0 * number + 0.5))
    fixed, token = rates.prompt_s
    assert fixed + 1000 * token == pytest.approx(0.5, rel=0.05)


def test_steps_are_timed_where_nothing_changes_and_no_prompt_is_computed() -> None:
    rates, now = new_rates(), 0.0
    for number in range(400):
        num_requests = 1 + 31 * (number % 2)
        for _ in range(20):
            now += 0.01 + 1e-3 * num_requests
            rates.tokens_came(now, number, num_requests, 0, 0)
    fixed, request, _ = rates.step_s
    assert fixed == pytest.approx(0.01, rel=0.15)
    assert request == pytest.approx(1e-3, rel=0.15)
    assert rates.prompt_gap_s == 0.0
    assert rates.number > 0


def test_steps_beside_prompts_are_told_apart() -> None:
    rates, now = new_rates(), 0.0
    before = rates.step_s
    for _ in range(500):
        now += 0.2
        rates.tokens_came(now, 1, 4, 1000, 500)
    assert rates.prompt_gap_s == pytest.approx(0.2)
    assert rates.step_s == before


def test_messages_that_come_together_are_averaged() -> None:
    rates, now = new_rates(), 0.0
    for _ in range(2000):
        now += 0.06
        for _ in range(6):
            rates.tokens_came(now, 1, 1, 0, 0)
    fixed, request, _ = rates.step_s
    assert fixed + request == pytest.approx(0.01, rel=0.2)


def test_handovers_are_timed_where_there_are_two_workers() -> None:
    shared = SharedRates("cpu")
    for number in range(500):
        num_pages = 100 * (number % 3)
        moments = {FIRST_TOKEN: 0, DECODE_STARTED: ns(0.004 + 1e-5 * num_pages)}
        shared.request_finished(Finished(moments, num_pages, [0] * 50), is_apart=True)
        shared.request_finished(Finished({FIRST_TOKEN: 0, DECODE_STARTED: ns(9.0)}, 0, [0] * 50), is_apart=False)
    assert shared.handover_s == pytest.approx((0.004, 1e-5), rel=0.1)
    assert shared.mean_output_tokens == pytest.approx(50.0)


def test_a_worker_that_joins_begins_as_fast_as_another() -> None:
    old, new = new_rates(), new_rates()
    for number in range(100):
        old.prompt_computed(100, ns(number), ns(number + 0.5))
    new.begin_like(old)
    assert new.prompt_s == old.prompt_s
    new.prompt_computed(100, 0, ns(0.1))
    new.prompt_computed(100, ns(1.0), ns(1.1))
    assert new.prompt_s != old.prompt_s
