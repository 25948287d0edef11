from dataclasses import dataclass, field

import pytest

from tandem.lifecycle import COMMITTED, DECODE_STARTED, FIRST_TOKEN, LEASE_GRANTED
from tandem.router.workers.distance import ELSEWHERE, SAME_HOST, SAME_RACK
from tandem.router.workers.rates import ClusterRates
from tests.fakes.clock import FakeClock


@dataclass
class Finished:
    moments: dict[str, int] = field(default_factory=dict)
    num_pages_shipped: int = 0
    output_ids: list[int] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0


def ns(seconds: float) -> int:
    return int(1e9 * seconds)


def asked_rates() -> ClusterRates:
    rates = ClusterRates("cpu", FakeClock())
    rates.handover_s(SAME_HOST)
    return rates


def finish(
    rates: ClusterRates, num_pages: int, took_s: float, waited_s: float = 0.0, distance: int = SAME_HOST
) -> None:
    """Finishes a request of 50 tokens. Args: waited_s: wait for the decode worker's pages, and again for its step."""
    granted = -0.1 + (waited_s + 0.1 if waited_s else 0.0)
    moments = {FIRST_TOKEN: 0, LEASE_GRANTED: ns(granted), COMMITTED: ns(max(0.0, granted) + took_s)}
    moments[DECODE_STARTED] = moments[COMMITTED] + ns(waited_s)
    rates.request_finished(Finished(moments, num_pages, [0] * 50), distance)


def test_farther_handover_never_takes_less() -> None:
    rates = asked_rates()
    for number in range(500):
        num_pages = 100 * (number % 3)
        finish(rates, num_pages, 0.02 + 1e-4 * num_pages, distance=SAME_HOST)
        finish(rates, num_pages, 0.03 + 5e-4 * num_pages, distance=SAME_RACK)
        finish(rates, num_pages, 0.01 + 2e-4 * num_pages, distance=ELSEWHERE)
    assert rates.handover_s(SAME_HOST) == pytest.approx((0.02, 1e-4), rel=0.1)
    assert rates.handover_s(SAME_RACK) == rates.handover_s(ELSEWHERE) == pytest.approx((0.03, 5e-4), rel=0.1)


def test_only_two_worker_handovers_are_timed() -> None:
    rates = asked_rates()
    for number in range(500):
        num_pages = 100 * (number % 3)
        finish(rates, num_pages, 0.004 + 1e-5 * num_pages)
        slow = {FIRST_TOKEN: 0, LEASE_GRANTED: 0, COMMITTED: ns(9.0)}
        rates.request_finished(Finished(slow, 0, [0] * 50), None)
    assert rates.handover_s(SAME_HOST) == pytest.approx((0.004, 1e-5), rel=0.1)
    assert rates.mean_output_tokens == pytest.approx(50.0)


def test_handover_excludes_waits_for_pages_and_steps() -> None:
    rates = asked_rates()
    for number in range(500):
        num_pages = 100 * (number % 3)
        finish(rates, num_pages, 0.004 + 1e-5 * num_pages, waited_s=20.0 * (number % 2))
    assert rates.handover_s(SAME_HOST) == pytest.approx((0.004, 1e-5), rel=0.1)


def test_slow_handovers_decay() -> None:
    clock = FakeClock()
    rates = ClusterRates("cuda", clock)
    start = rates.handover_s(SAME_HOST)
    for _ in range(100):
        finish(rates, 100, 2.0)
    assert sum(rates.handover_s(SAME_HOST)) > 0.1
    for _ in range(300):
        clock.advance(1.0)
        fixed, page = rates.handover_s(SAME_HOST)
    assert fixed + 100 * page < 2 * (start[0] + 100 * start[1])


def test_accepted_drafts_save_steps_of_an_output() -> None:
    rates = asked_rates()
    for _ in range(500):
        rates.request_finished(Finished(output_ids=[0] * 50, num_drafted=60, num_accepted=20), None)
    assert rates.mean_output_tokens == pytest.approx(50.0)
    assert (rates.mean_output_steps, rates.mean_drafts) == (pytest.approx(30.0), pytest.approx(2.0))
    assert (rates.num_finished_tokens, rates.num_finished_steps) == (500 * 50, 500 * 30)
