"""Arrival times of each kind."""

import statistics
from itertools import islice, pairwise

import pytest

from tandem.bench.arrivals import ArrivalConfig, arrival_times

MANY = 20_000


def times(config: ArrivalConfig, num: int, seed: int = 1) -> list[float]:
    found = list(islice(arrival_times(config, seed), num))
    assert all(moment is not None for moment in found)
    return [moment for moment in found if moment is not None]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_wanted_mean_and_variance(burstiness: float) -> None:
    gaps = [b - a for a, b in pairwise(times(ArrivalConfig("gamma", 5.0, burstiness), MANY))]
    assert statistics.fmean(gaps) == pytest.approx(1 / 5.0, rel=0.05)
    assert statistics.variance(gaps) == pytest.approx(1 / (burstiness * 5.0**2), rel=0.12)


def test_poisson_gaps_vary_as_much_as_they_are_long() -> None:
    gaps = [b - a for a, b in pairwise(times(ArrivalConfig("poisson", 20.0), MANY))]
    assert statistics.fmean(gaps) == pytest.approx(0.05, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.05, rel=0.05)


def test_even_and_bunched_arrivals() -> None:
    assert times(ArrivalConfig("constant", 4.0), 4) == [0.0, 0.25, 0.5, 0.75]
    assert times(ArrivalConfig("burst", 4.0, burst_size=2), 5) == [0.0, 0.0, 0.5, 0.5, 1.0]


def test_a_seed_gives_the_same_times_and_another_gives_others() -> None:
    config = ArrivalConfig("poisson", 3.0)
    assert times(config, 10) == times(config, 10) != times(config, 10, seed=2)


def test_closed_arrivals_have_no_times() -> None:
    assert list(islice(arrival_times(ArrivalConfig(concurrency=3), 0), 3)) == [None] * 3


@pytest.mark.parametrize(
    "wrong",
    [{"kind": "poisson"}, {"kind": "gamma", "rate": 1.0, "burstiness": 0.0}, {"concurrency": 0}, {"kind": "often"}],
)
def test_malformed_arrivals_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        ArrivalConfig(**wrong)  # type: ignore[arg-type]
