"""Rates of arrivals and their trends, from noisy counts."""

import random
from collections.abc import Callable

import pytest

from tandem.deploy.supervise.arrival_history import WINDOWS, ArrivalHistory, Rate


def after(seconds: int, rate: Callable[[int], float], seed: int = 1) -> Rate:
    """Returns the rate after Poisson arrivals."""
    source = random.Random(seed)
    history = ArrivalHistory(0.0)
    for second in range(seconds):
        count, at = 0, source.expovariate(1.0)
        while at < rate(second):
            count, at = count + 1, at + source.expovariate(1.0)
        history.pass_time(second + 1.0)
        history.add(count, 1.0, second + 1.0)
    return history.rate()


def test_nothing_has_a_rate_of_zero() -> None:
    assert ArrivalHistory(1000.5).rate() == Rate()
    assert after(100, lambda _: 0.0) == Rate(0.0, 0.0, 100.0, 0.0, 0.0)


@pytest.mark.parametrize("rate", [0.2, 3.0, 50.0])
def test_constant_load_is_measured_over_the_longest_window(rate: float) -> None:
    for seed in range(5):
        found = after(600, lambda _: rate, seed)
        assert (found.slope, found.seen_s) == (0.0, WINDOWS[-1])
        assert abs(found.now - rate) < 4 * found.deviation


@pytest.mark.parametrize(("before", "now"), [(2.0, 20.0), (20.0, 2.0)])
def test_a_jump_is_followed_without_a_trend(before: float, now: float) -> None:
    found = after(315, lambda second: now if second >= 300 else before)
    assert found.slope == 0.0
    assert found.now == pytest.approx(now, rel=0.4)
    assert found.seen_s <= 20.0 and found.recent == pytest.approx(now, abs=6.0)


def test_a_rise_has_a_trend_that_lasts_as_long_as_it_was_seen() -> None:
    found = after(350, lambda second: 2.0 + 0.3 * max(0, second - 300))
    assert found.slope == pytest.approx(0.3, rel=0.5)
    assert found.after(10.0) == pytest.approx(20.0, rel=0.3)
    assert found.after(1000.0) == found.after(found.seen_s)


def test_a_slow_rise_is_seen_in_a_long_window() -> None:
    found = after(400, lambda second: 5.0 + 0.05 * max(0, second - 200))
    assert found.slope == pytest.approx(0.05, rel=0.5) and found.seen_s >= 80.0


def test_late_reports_are_spread_over_their_time() -> None:
    history = ArrivalHistory(0.0)
    for second in range(1, 101):
        history.pass_time(float(second))
        history.add(4, 1.0, float(second))
    history.pass_time(130.0)
    history.add(120, 30.0, 130.0)
    history.pass_time(131.0)
    assert history.rate().now == pytest.approx(4.0, rel=0.05)


def test_bursts_are_no_changes() -> None:
    """Six requests at once, every 25 seconds."""
    history = ArrivalHistory(0.0)
    rates = []
    for second in range(600):
        history.pass_time(second + 1.0)
        history.add(6 * (second % 25 == 0), 1.0, second + 1.0)
        if second > 320:
            rates.append(history.rate())
    assert all(rate.now == pytest.approx(0.24, abs=0.03) and rate.slope == 0.0 for rate in rates)
