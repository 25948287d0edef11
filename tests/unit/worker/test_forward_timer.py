import random
from dataclasses import astuple

import pytest

from tandem.forward_times import start_times
from tandem.messages import ForwardTimes
from tandem.worker.forward_timer import (
    GAP_FORGOTTEN_S,
    INTERVAL_S,
    MAX_OVERRUN,
    NUM_OVERRUNS,
    FittedTimes,
    ForwardTimer,
)
from tests.fakes.clock import FakeClock

PROMPT = (0.010, 50e-6, 2e-9)
STEP = (0.008, 60e-6, 5e-8)


class Device:
    """Runs one forward pass after the other while the host waits."""

    def __init__(self) -> None:
        self.clock, self.rng = FakeClock(), random.Random(0)
        self.timer = ForwardTimer("cuda:0", self.clock)

    @property
    def factors(self) -> tuple[float, ...]:
        return astuple(self.timer.times())

    def prompt(self, slowness: float = 1.0) -> None:
        num_tokens = self.rng.randrange(64, 4096)
        num_attended = num_tokens * self.rng.randrange(8000) + num_tokens**2 // 2
        began = self.clock.now
        self.timer.prompts_launched(began, num_tokens, num_attended)
        self.clock.advance(slowness * (PROMPT[0] + PROMPT[1] * num_tokens + PROMPT[2] * num_attended))
        self.timer.prompts_ended()
        self.timer.times()

    def step(self, idle_s: float = 0.0) -> None:
        num_requests = self.rng.randrange(1, 128)
        num_context = num_requests * self.rng.randrange(100, 4000)
        self.timer.step_launched(num_requests, num_context)
        self.clock.advance(STEP[0] + STEP[1] * num_requests + STEP[2] * num_context)
        self.timer.step_ended(idle_s=idle_s)
        self.timer.times()


def test_timer_starts_with_device_defaults() -> None:
    for device in ("cuda:3", "cpu"):
        clock = FakeClock()
        timer = ForwardTimer(device, clock)
        assert timer.fitted == FittedTimes(*astuple(start_times(device)))
        clock.advance(10.0)
        assert timer.times() == ForwardTimes()


def test_prompts_by_themselves_are_timed_from_launch_to_end() -> None:
    device = Device()
    for _ in range(300):
        device.prompt()
        device.clock.advance(0.5)
    assert device.factors[:3] == pytest.approx(PROMPT, rel=0.15)
    assert device.timer.times().gap_beside_prompts_s == 0.0


def test_queued_forward_is_timed_from_the_previous_end() -> None:
    device = Device()
    device.timer.prompts_launched(device.clock.now, 1000, 500_000)
    for _ in range(300):
        device.timer.prompts_launched(device.clock.now, 1000, 500_000)
        device.clock.advance(0.1)
        device.timer.prompts_ended()
        device.timer.times()
    times = device.timer.times()
    took_s = times.prefill_s + 1000 * times.prompt_token_s + 500_000 * times.attended_token_s
    assert took_s == pytest.approx(0.1, rel=0.02)


def test_steps_are_timed_from_end_to_end() -> None:
    device = Device()
    for number in range(500):
        device.step()
        if number % 50 == 49:
            device.timer.nothing_decoded()
            device.clock.advance(10.0)
    assert device.factors[3:6] == pytest.approx(STEP, rel=0.15)
    assert device.factors[:3] == pytest.approx(astuple(start_times("cuda"))[:3])


def test_idle_time_before_a_step_is_no_part_of_it() -> None:
    device = Device()
    for _ in range(500):
        device.clock.advance(0.005)
        device.step(idle_s=0.005)
    assert device.factors[3:6] == pytest.approx(STEP, rel=0.15)


def test_alternating_steps_and_prompts_fit_both() -> None:
    device = Device()
    for number in range(2000):
        device.step()
        if number % 3:
            device.prompt()
    assert device.factors[:3] == pytest.approx(PROMPT, rel=0.15)
    assert device.factors[3:6] == pytest.approx(STEP, rel=0.15)
    assert device.timer.times().gap_beside_prompts_s == pytest.approx(0.15, rel=0.4)
    for _ in range(200):
        device.step()
    assert device.timer.times().gap_beside_prompts_s > 0.0
    device.clock.advance(GAP_FORGOTTEN_S)
    assert device.timer.times().gap_beside_prompts_s == 0.0


def test_mixed_prompts_count_for_their_step() -> None:
    device = Device()
    numbers = [(device.rng.randrange(64, 2048), device.rng.randrange(1, 64)) for _ in range(1500)]

    def launch(num_tokens: int, num_requests: int) -> None:
        device.timer.prompts_launched(device.clock.now, num_tokens, num_tokens**2 // 2)
        device.timer.step_launched(num_requests, 1000 * num_requests)

    # Each is launched while the previous one runs.
    launch(*numbers[0])
    for (num_tokens, num_requests), behind in zip(numbers, [*numbers[1:], numbers[0]], strict=True):
        launch(*behind)
        device.clock.advance(PROMPT[0] + PROMPT[1] * num_tokens + PROMPT[2] * num_tokens**2 / 2)
        device.clock.advance(STEP[0] + STEP[1] * num_requests + STEP[2] * 1000 * num_requests)
        device.timer.step_ended()
        device.timer.prompts_ended(is_mixed=True)
        device.timer.times()
    times = device.timer.fitted
    for num_tokens, num_requests in numbers[-50:]:
        expected = PROMPT[0] + PROMPT[1] * num_tokens + PROMPT[2] * num_tokens**2 / 2
        expected += STEP[0] + STEP[1] * num_requests + STEP[2] * 1000 * num_requests
        found = times.prefill_s + times.prompt_token_s * num_tokens + times.attended_token_s * num_tokens**2 / 2
        found += times.step_s + times.request_s * num_requests + times.kv_token_s * 1000 * num_requests
        assert found == pytest.approx(expected, rel=0.03)
    assert device.timer.max_prompt_tokens > 1900


def test_step_without_remaining_requests_does_not_start_the_next() -> None:
    device = Device()
    device.timer.step_launched(1, 10)
    device.timer.nothing_decoded()
    device.timer.step_ended()
    device.clock.advance(50.0)
    device.timer.step_launched(1, 10)
    device.clock.advance(0.01)
    device.timer.step_ended()
    assert device.timer.fitted == FittedTimes(*astuple(start_times("cuda")))


def test_mixed_step_without_remaining_requests_is_ignored() -> None:
    device = Device()
    for _ in range(20):
        device.timer.prompts_launched(device.clock.now, 1000, 500_000)
        device.timer.step_launched(100, 100_000)
        device.timer.nothing_decoded()
        device.clock.advance(1.0)
        device.timer.step_ended()
        device.timer.prompts_ended(is_mixed=True)
    assert device.timer.fitted == FittedTimes(*astuple(start_times("cuda")))


def test_one_slow_prompt_does_not_make_a_slow_worker() -> None:
    device = Device()
    for _ in range(200):
        device.prompt()
    before = device.timer.times().prompt_token_s
    device.prompt(slowness=1000.0)
    device.clock.advance(INTERVAL_S)
    times = device.timer.times()
    assert times.prefill_s + 2000 * times.prompt_token_s < 1.3 * (PROMPT[0] + 2000 * PROMPT[1])
    assert times.prompt_token_s < 1.3 * before


@pytest.mark.parametrize("is_behind", [True, False])
def test_prompt_time_excludes_the_step_before_it(is_behind: bool) -> None:
    now = 0.0
    timer = ForwardTimer("cpu", lambda: now)
    for _ in range(200):
        timer.step_launched(1, 100)
        if is_behind:
            timer.prompts_launched(now, 100, 5000)
        now += 0.5
        timer.step_ended()
        timer.nothing_decoded()
        if not is_behind:
            timer.prompts_launched(now, 100, 5000)
        now += 0.2
        timer.prompts_ended()
    found = timer.fitted
    assert found.prefill_s + 100 * found.prompt_token_s + 5000 * found.attended_token_s == pytest.approx(0.2, rel=0.02)


def test_overrun_bounds_nearly_all_mixed_steps() -> None:
    device = Device()

    def mixed(slowness: float) -> None:
        num_tokens = device.rng.randrange(64, 1024)
        device.timer.prompts_launched(device.clock.now, num_tokens, num_tokens**2 // 2)
        device.timer.step_launched(32, 64_000)
        seconds = STEP[0] + STEP[1] * 32 + STEP[2] * 64_000 + PROMPT[1] * num_tokens + PROMPT[2] * num_tokens**2 / 2
        device.clock.advance(slowness * seconds)
        device.timer.step_ended()
        device.timer.prompts_ended(is_mixed=True)
        device.timer.times()

    assert device.timer.overrun == 1.0
    for _ in range(200):
        mixed(1.0)
    assert device.timer.overrun == pytest.approx(1.0, abs=0.02)
    # Every tenth takes 20 % longer, unpredictably; the fit lies between.
    for number in range(400):
        mixed(1.2 if number % 10 == 0 else 1.0)
    assert device.timer.overrun == pytest.approx(1.2 / 1.02, abs=0.03)
    for _ in range(NUM_OVERRUNS):
        mixed(1.0)
    assert device.timer.overrun == pytest.approx(1.0, abs=0.03)
    for number in range(NUM_OVERRUNS):
        mixed(20.0 if number % 2 else 1.0)
    assert device.timer.overrun <= MAX_OVERRUN
