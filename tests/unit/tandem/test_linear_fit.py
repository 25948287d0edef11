"""Least squares, weighted by age."""

import random

import pytest

from tandem.linear_fit import LinearFit


def test_initial_factors_before_observations() -> None:
    assert LinearFit((0.5, 0.01)).factors == pytest.approx((0.5, 0.01))


def test_fit_finds_the_factors() -> None:
    fit, rng = LinearFit((1.0, 1e-4)), random.Random(0)
    for _ in range(1000):
        num_tokens = rng.randrange(1, 8000)
        fit.observe((1.0, num_tokens), 0.01 + 3e-5 * num_tokens)
    assert fit.factors == pytest.approx((0.01, 3e-5), rel=0.1)


def test_fit_follows_changes() -> None:
    fit = LinearFit((0.1, 0.1))
    for seconds in (1.0, 2.0):
        for number in range(1000):
            fit.observe((1.0, number % 20), seconds * (number % 20))
    assert fit.factors[1] == pytest.approx(2.0, rel=0.05)


def test_fit_of_identical_observations() -> None:
    fit = LinearFit((0.02, 1e-4))
    for _ in range(1000):
        fit.observe((1.0, 100.0), 0.09)
    fixed, token = fit.factors
    assert fixed + 100 * token == pytest.approx(0.09, rel=0.02)
    assert fixed > 0 and token > 0


def test_no_factor_is_negative() -> None:
    fit = LinearFit((1.0, 1.0))
    for number in range(100):
        fit.observe((1.0, number), 100.0 - number)
    assert min(fit.factors) >= 0.0


def test_many_observations_of_one_kind_keep_the_others() -> None:
    fit, rng = LinearFit((1e-2, 1e-2, 1e-5)), random.Random(0)

    def observe(is_both: bool) -> None:
        num_requests, num_tokens = rng.randrange(1, 64), rng.randrange(1, 4000) if is_both else 0
        fit.observe((1.0, num_requests, num_tokens), 0.05 + 3e-3 * num_requests + 4e-5 * num_tokens)

    for _ in range(100):
        observe(is_both=True)
    for _ in range(5000):
        observe(is_both=False)
    assert fit.factors == pytest.approx((0.05, 3e-3, 4e-5), rel=0.1)


def test_outliers_count_little_and_lasting_changes_fully() -> None:
    fit = LinearFit((1.0,))
    for _ in range(100):
        fit.observe((1.0,), 1.0)
    fit.observe((1.0,), 1000.0)
    assert fit.factors[0] < 1.1
    for _ in range(400):
        fit.observe((1.0,), 1000.0)
    assert fit.factors[0] == pytest.approx(1000.0, rel=0.05)


@pytest.mark.parametrize("first", [0.2, 5.0])
def test_slow_time_is_forgotten_without_observations(first: float) -> None:
    """Even if the initial factors were far off."""
    fit = LinearFit((1.0, 1e-3))

    def serve(seconds: int, slowness: float) -> None:
        for number in range(4 * seconds):
            size = 100 * (number % 30)
            fit.observe((1.0, size), slowness * first * (1.0 + 1e-3 * size))
            fit.pass_time(0.25)

    serve(600, 1.0)
    serve(20, 20.0)
    slow = fit.factors
    assert slow[0] + 1000 * slow[1] > 10 * 2 * first
    for _ in range(4 * 180):
        fit.pass_time(0.25)
    fixed, each = fit.factors
    # The usual factors have moved by a sixth of the way.
    assert fixed + 1000 * each < 5 * 2 * first


def test_lasting_slowness_is_forgotten_without_observations() -> None:
    fit = LinearFit((1.0, 1e-3))
    for number in range(4 * 1200):
        size = 100 * (number % 30)
        fit.observe((1.0, size), 10.0 * (1.0 + 1e-3 * size))
        fit.pass_time(0.25)
    usual = []
    for _ in range(3):
        for _ in range(600):
            fit.pass_time(1.0)
        usual.append(fit.factors[0])
    assert 2.0 < usual[0] < 10.0
    assert usual == sorted(usual, reverse=True) and usual[2] < 1.5


@pytest.mark.parametrize("interval_s", [0.25, 2.0, 10.0])
def test_usual_time_is_learned_from_rare_observations(interval_s: float) -> None:
    """And kept during a minute without observations."""
    fit = LinearFit((1.0, 1e-3))
    for number in range(4 * 3600):
        if number % (4 * interval_s) == 0:
            size = 100 * (number % 30)
            fit.observe((1.0, size), 10.0 * (1.0 + 1e-3 * size))
        fit.pass_time(0.25)
    for _ in range(4 * 60):
        fit.pass_time(0.25)
    fixed, each = fit.factors
    assert 8.0 * 2 < fixed + 1000 * each < 12.0 * 2


@pytest.mark.parametrize("idle_hours", [1.0, 4.05, 24.0])
def test_fit_learns_again_after_idle_hours(idle_hours: float) -> None:
    fit = LinearFit((1.0, 1e-3))
    for size in range(100):
        fit.observe((1.0, size), 1.0)
    for _ in range(int(idle_hours * 3600)):
        fit.pass_time(1.0)
    for size in range(200):
        fit.observe((1.0, 100 * (size % 30)), 0.5 + 2e-3 * 100 * (size % 30))
    assert fit.factors == pytest.approx((0.5, 2e-3), rel=0.1)


def test_fit_learns_again_after_one_long_time() -> None:
    for idle_s in range(14200, 15000, 10):
        fit = LinearFit((1.0,))
        fit.observe((1.0,), 1.0)
        fit.pass_time(idle_s)
        fit.observe((1.0,), 2.0)
        assert 1.0 <= fit.factors[0] <= 2.0
