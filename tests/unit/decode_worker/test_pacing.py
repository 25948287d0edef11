"""When a decode worker composes its next step."""

import pytest

from decode_worker.pacing import HOST_FACTOR, WAKE_UP_S, WINDOW, StepPace
from tests.fakes.clock import FakeClock

STEP_S = 0.010
HOST_S = 0.001
LEAD_S = HOST_FACTOR * HOST_S + WAKE_UP_S


class Device:
    """Steps that are launched behind one another, as a scheduler does it."""

    def __init__(self) -> None:
        self.clock = FakeClock(0.0)
        self.pace = StepPace(self.clock)
        self._ends: list[tuple[float, float]] = []

    def launch(self, duration_s: float, host_s: float = HOST_S, is_mixed: bool = False) -> None:
        self.pace.composing()
        self.clock.advance(host_s)
        begins = max([self.clock.now, *(end for end, _ in self._ends)])
        self._ends.append((begins + duration_s, duration_s))
        self.pace.launched(is_mixed=is_mixed)

    def collect(self) -> None:
        end, duration_s = self._ends.pop(0)
        self.clock.now = max(self.clock.now, end)
        self.pace.ended(duration_s)

    def step(self, duration_s: float, host_s: float = HOST_S) -> float:
        """Waits until the next step is due, launches it and collects the one before; returns for how long the device
        had nothing to do."""
        self.clock.now = max(self.clock.now, self.pace.due)
        ended = self._ends[0][0]
        self.launch(duration_s, host_s)
        idle_s = max(0.0, self.clock.now - ended)
        self.collect()
        return idle_s


def test_without_experience_the_next_step_is_composed_at_once() -> None:
    device = Device()
    device.launch(STEP_S)
    assert device.pace.is_due


def test_the_next_step_is_composed_just_before_the_running_one_ends() -> None:
    device = Device()
    device.launch(STEP_S)
    for _ in range(5):
        assert device.step(STEP_S) == 0.0
    assert not device.pace.is_due
    assert device.pace.due == pytest.approx(device.clock.now + STEP_S - LEAD_S)
    device.clock.now = device.pace.due
    assert device.pace.is_due


def test_the_device_never_waits_for_steps_of_varying_length() -> None:
    device = Device()
    device.launch(STEP_S)
    for i in range(50):
        assert device.step(STEP_S * (1 + i % 4)) == 0.0


def test_a_shorter_step_makes_the_device_wait_once() -> None:
    device = Device()
    device.launch(STEP_S)
    for _ in range(20):
        device.step(STEP_S)
    device.step(STEP_S / 4)
    assert device.step(STEP_S / 4) > 0.0
    assert [device.step(STEP_S / 4) for _ in range(10)] == [0.0] * 10


def test_longer_steps_are_soon_composed_late_again() -> None:
    device = Device()
    device.launch(STEP_S)
    for _ in range(WINDOW):
        device.step(STEP_S)
    for _ in range(WINDOW + 2):
        device.step(3 * STEP_S)
    assert device.pace.due == pytest.approx(device.clock.now + 3 * STEP_S - LEAD_S)


def test_a_host_that_becomes_slow_is_given_more_time() -> None:
    device = Device()
    device.launch(STEP_S)
    for _ in range(WINDOW):
        device.step(STEP_S)
    device.step(STEP_S, host_s=3 * HOST_S)
    assert [device.step(STEP_S, host_s=3 * HOST_S) for _ in range(10)] == [0.0] * 10


def test_steps_shorter_than_the_hosts_work_are_composed_at_once() -> None:
    device = Device()
    device.launch(HOST_S / 2)
    for _ in range(3):
        device.step(HOST_S / 2)
    assert device.pace.is_due


def test_a_step_with_prompts_says_nothing_of_how_long_those_without_take() -> None:
    device = Device()
    device.launch(STEP_S)
    for _ in range(3):
        device.step(STEP_S)
    for _ in range(WINDOW):
        device.launch(5 * STEP_S, host_s=2 * STEP_S, is_mixed=True)
        end, duration_s = device._ends.pop(0)
        device.clock.now = max(device.clock.now, end)
        device.pace.ended(duration_s, is_mixed=duration_s > STEP_S)
    assert device.pace.due == pytest.approx(device.clock.now + STEP_S - LEAD_S)
