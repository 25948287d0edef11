"""Bounds of a cluster that sizes itself, for traces."""

from collections.abc import Callable
from itertools import islice

import pytest

from tandem.deploy.estimate.bounds import (
    SERVED_SHARE,
    WINDOW_S,
    Arrival,
    TraceNeeds,
    mean_of,
    needs_of,
)
from tandem.deploy.estimate.gpus import GPUS
from tandem.deploy.estimate.rates import Load, best_rates, splits
from tandem.deploy.estimate.worker import Worker
from tests.fakes.model_shapes import LLAMA_8B

WORKER = Worker(LLAMA_8B, GPUS["h200"])
LOAD = Load(4096, 256, 0.5, 0.025)


def needing(*workers: int) -> TraceNeeds:
    """Returns needs of a trace with ten requests a second for each needed worker."""
    rates = [10.0 * count for count in range(1, max(workers) + 1)]
    return TraceNeeds(rates, workers, [10.0 * count for count in workers], [600 * count for count in workers])


def arrivals(rate: Callable[[int], float], minutes: int) -> list[Arrival]:
    return [
        Arrival(60.0 * minute + 60.0 * number / count, 4096, 256)
        for minute in range(minutes)
        for count in [round(60 * rate(minute))]
        for number in range(count)
    ]


def test_constant_load_needs_a_fixed_number() -> None:
    sized = needing(*[3] * 60).cheapest(60.0)
    assert (sized.low, sized.high, sized.served_share) == (3, 3, 1.0)
    assert sized == needing(*[3] * 60).fixed()


def test_slow_waves_are_cheaper_with_bounds() -> None:
    """A day of 1 to 8 workers, an hour each."""
    needs = needing(*[count for count in (1, 2, 4, 8, 8, 4, 2, 1) for _ in range(60)])
    sized, fixed = needs.cheapest(60.0), needs.fixed()
    assert (sized.low, sized.high) == (1, 8)
    assert sized.served_share >= SERVED_SHARE and fixed.served_share >= SERVED_SHARE
    assert sized.worker_s < 0.7 * fixed.worker_s


def test_sudden_load_raises_the_lower_bound() -> None:
    """Load that comes and goes faster than a worker starts is served by workers that stay."""
    needs = needing(*([1] * 40 + [6] * 5) * 5)
    slow, fast = needs.cheapest(600.0), needs.cheapest(0.0)
    assert slow.low >= 5
    assert fast.worker_s < slow.worker_s


def test_idle_hours_need_no_worker() -> None:
    needs = needing(*[2] * 180, *[0] * 600, *[2] * 180)
    sized = needs.cheapest(60.0)
    assert (sized.low, sized.high) == (0, 2)
    assert 2 * 360 * WINDOW_S < sized.worker_s < 2 * 380 * WINDOW_S


def test_needs_follow_the_rate() -> None:
    one, two = islice(best_rates(WORKER, LOAD), 2)
    assert two == splits(WORKER, LOAD, 2)[0].rate
    needs = needs_of(WORKER, LOAD, arrivals(lambda minute: (0.5 if minute < 3 else 1.5) * one, 6))
    assert needs.needs == [1, 1, 1, 2, 2, 2]
    assert needs.demands == pytest.approx([0.5 * one] * 3 + [1.5 * one] * 3, rel=0.02)


def test_long_requests_count_for_several() -> None:
    trace = [Arrival(second, 8192 if second >= 60 else 2048, 256) for second in range(120)]
    needs = needs_of(WORKER, LOAD, trace)
    assert needs.counts == [60, 60]
    assert needs.demands[1] > 2 * needs.demands[0]
    assert mean_of(trace) == (5120, 256)


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--slo is too strict.*alone.* prompt of \d+ tokens takes [\d.]+ ms \(ttft\)"):
        needs_of(WORKER, Load(4096, 256, 0.01, 0.025), arrivals(lambda _: 1.0, 2))
