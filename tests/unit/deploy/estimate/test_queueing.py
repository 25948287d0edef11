"""Queues and batch sizes against simulations."""

import random
from math import exp, inf

import pytest

from tandem.deploy.estimate.queueing import Running, highest, late, more_than


@pytest.mark.parametrize("num_servers", [1, 3])
def test_a_line_is_as_long_as_it_is_simulated_to_be(num_servers: int) -> None:
    service, wait = 0.1, 0.3
    utilisation = highest(lambda busy: late(num_servers, busy, service, wait) <= 0.1, 1.0)
    rng = random.Random(7)
    now, free, waits = 0.0, [0.0] * num_servers, []
    for _ in range(60_000):
        now += rng.expovariate(num_servers * utilisation / service)
        begin = max(now, min(free))
        free[free.index(min(free))] = begin + service
        waits.append(begin - now)
    in_time = sum(waited <= wait for waited in waits) / len(waits)
    assert in_time == pytest.approx(0.9, abs=0.03)


def test_nobody_is_in_time_where_there_is_none_and_all_are_where_there_is_no_limit() -> None:
    assert late(2, 0.5, 0.1, -0.1) == late(2, 1.0, 0.1, 0.3) == 1.0
    assert late(2, 0.5, 0.1, inf) == 0.0


def test_as_many_run_at_once_as_are_simulated_to() -> None:
    rate, output_len = 14.7, 255
    steps = [4.6e-3 + 0.155e-3 * number for number in range(1, 257)]
    numbers, slow = _simulated(rate, output_len, steps)
    running = Running(steps, rate * output_len)
    assert running.mean == pytest.approx(sum(numbers) / len(numbers), rel=0.1)
    # For one request in ten, the slow steps are larger.
    largest = sorted(slow)[int(0.9 * len(slow))]
    assert slow_share(running, largest + 5) < 0.1 < slow_share(running, largest - 5)


def test_more_workers_even_out_and_too_many_requests_are_too_many_for_any_number() -> None:
    steps = [4.6e-3 + 0.155e-3 * number for number in range(1, 257)]
    alone, shared = (Running(steps, 3700.0, num_workers) for num_workers in (1, 4))
    assert slow_share(shared, 60) < slow_share(alone, 60)
    assert slow_share(Running(steps, 7000.0), 256) == 1.0


def slow_share(running: Running, largest: int) -> float:
    """Returns the share of slow requests if all steps of more than `largest` are slow."""
    return running.slow_share([float(others >= largest) for others in range(len(running.shares) - 1)])


def test_rarely_slow_requests_add_up_by_their_time() -> None:
    running = Running([4.6e-3 + 0.155e-3 * number for number in range(1, 257)], 3700.0)
    rarely = running.slow_share([0.1] * 256)
    assert rarely == pytest.approx(0.1, rel=0.01)
    assert running.slow_share([0.0] * 256) < 1e-6
    assert slow_share(running, 0) == pytest.approx(1.0)


def test_more_than_a_number_of_arrivals() -> None:
    assert more_than(0, 0.5) == pytest.approx(1 - exp(-0.5))
    assert more_than(1, 0.5) == pytest.approx(1 - 1.5 * exp(-0.5))
    assert more_than(800, 750.0) == pytest.approx(0.034, abs=0.003)
    assert more_than(12, 1e4) == 1.0


def _simulated(rate: float, output_len: int, steps: list[float]) -> tuple[list[int], list[int]]:
    """Returns each step's batch size, and for each request the 95th percentile of its steps."""
    rng = random.Random(7)
    now, arrival, numbers = 0.0, 0.0, []
    begins, num_running = [], 0
    ends: dict[int, int] = {}
    while len(numbers) < 60_000:
        while arrival <= now or not num_running:
            now = max(now, arrival)
            begins.append(len(numbers))
            end = len(numbers) + output_len
            ends[end] = ends.get(end, 0) + 1
            num_running += 1
            arrival += rng.expovariate(rate)
        numbers.append(num_running)
        now += steps[num_running - 1]
        num_running -= ends.pop(len(numbers), 0)
    warm = [begin for begin in begins if 5_000 < begin < len(numbers) - output_len]
    slow = [sorted(numbers[begin : begin + output_len])[int(0.95 * output_len)] for begin in warm]
    return numbers[5_000:], slow
