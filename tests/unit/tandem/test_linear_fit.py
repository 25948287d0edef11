"""Least squares, with the newest counting most."""

import random

import pytest

from tandem.linear_fit import LinearFit


def test_before_anything_is_observed_it_has_its_start() -> None:
    assert LinearFit((0.5, 0.01)).factors == pytest.approx((0.5, 0.01))


def test_it_finds_the_factors_that_observations_have() -> None:
    fit, rng = LinearFit((1.0, 1e-4)), random.Random(0)
    for _ in range(1000):
        num_tokens = rng.randrange(1, 8000)
        fit.observe((1.0, num_tokens), 0.01 + 3e-5 * num_tokens)
    assert fit.factors == pytest.approx((0.01, 3e-5), rel=0.1)


def test_it_follows_what_changes() -> None:
    fit = LinearFit((0.1, 0.1))
    for seconds in (1.0, 2.0):
        for number in range(1000):
            fit.observe((1.0, number % 20), seconds * (number % 20))
    assert fit.factors[1] == pytest.approx(2.0, rel=0.05)


def test_where_all_are_alike_it_is_right_for_those_and_near_its_start_elsewhere() -> None:
    fit = LinearFit((0.02, 1e-4))
    for _ in range(1000):
        fit.observe((1.0, 100.0), 0.09)
    fixed, token = fit.factors
    assert fixed + 100 * token == pytest.approx(0.09, rel=0.02)
    assert fixed > 0 and token > 0


def test_no_factor_is_negative_and_a_copy_learns_by_itself() -> None:
    fit = LinearFit((1.0, 1.0))
    other = fit.copy()
    for number in range(100):
        fit.observe((1.0, number), 100.0 - number)
    assert min(fit.factors) >= 0.0
    assert other.factors == pytest.approx((1.0, 1.0))
