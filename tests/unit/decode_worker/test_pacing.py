import pytest

from tandem.decode_worker.pacing import HOST_FACTOR, SHARE, WAKE_UP_S, WINDOW, StepPace
from tests.fakes.clock import FakeClock

STEP_S = 0.010
HOST_S = 0.001
LEAD_S = HOST_FACTOR * HOST_S + WAKE_UP_S


class Device:
    """A device that runs the launched steps one after the other."""

    def __init__(self) -> None:
        self.clock = FakeClock(0.0)
        self.pace = StepPace(self.clock)
        self._ends: list[tuple[float, float]] = []

    def launch(
        self, duration_s: float, host_s: float = HOST_S, launch_s: float = 0.0, expected_s: float | None = None
    ) -> None:
        """Args: launch_s: time to launch the kernels; the first may run at once."""
        self.pace.composing()
        self.clock.advance(host_s)
        self.pace.launching()
        begins = max([self.clock.now, *(end for end, _ in self._ends)])
        self.clock.advance(launch_s)
        self._ends.append((max(begins + duration_s, self.clock.now), duration_s))
        self.pace.launched(expected_s)

    def collect(self) -> None:
        end, duration_s = self._ends.pop(0)
        was_running = self.clock.now < end
        self.clock.now = max(self.clock.now, end)
        self.pace.ended(duration_s, was_running=was_running)

    def step(self, duration_s: float, host_s: float = HOST_S, with_prompts: bool = False, **kwargs: float) -> float:
        """Launch the next step when due and collect the previous one; return the device's idle time."""
        self.clock.now = max(self.clock.now, self.pace.due(with_prompts=with_prompts))
        ended = self._ends[0][0]
        launched_at = self.clock.now + host_s
        self.launch(duration_s, host_s, **kwargs)
        self.collect()
        return max(0.0, launched_at - ended)


def test_without_experience_the_next_step_is_composed_at_once() -> None:
    device = Device()
    device.launch(STEP_S)
    assert device.pace.is_due()


def test_the_next_step_is_composed_just_before_the_running_one_ends() -> None:
    device = Device()
    device.launch(STEP_S)
    for _ in range(5):
        assert device.step(STEP_S) == 0.0
    assert not device.pace.is_due()
    assert device.pace.due() == pytest.approx(device.clock.now + STEP_S - LEAD_S)
    device.clock.now = device.pace.due()
    assert device.pace.is_due()


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
    assert device.pace.due() == pytest.approx(device.clock.now + 3 * STEP_S - LEAD_S)


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
    assert device.pace.is_due()


def test_mixed_step_time_does_not_change_decode_step_time() -> None:
    device = Device()
    device.launch(STEP_S)
    for _ in range(3):
        device.step(STEP_S)
    for _ in range(WINDOW):
        device.step(5 * STEP_S, host_s=2 * STEP_S, expected_s=5 * STEP_S, with_prompts=True)
    device.step(STEP_S)
    assert device.pace.due() == pytest.approx(device.clock.now + STEP_S - LEAD_S)


def test_step_after_a_mixed_step_is_timed_by_its_expected_time() -> None:
    device = Device()
    device.launch(STEP_S)
    # Various sizes, up to 10 % off their expected time.
    idle_s = [
        device.step(STEP_S * (1 + i % 3) * (0.9 + 0.1 * (i % 3)), expected_s=STEP_S * (1 + i % 3), with_prompts=True)
        for i in range(40)
    ]
    assert idle_s == [0.0] * 40
    device.step(2 * STEP_S, expected_s=2 * STEP_S, with_prompts=True)
    assert device.pace.due(with_prompts=True) == pytest.approx(device.clock.now + 0.9 * 2 * STEP_S - LEAD_S)


def test_mixed_step_of_unknown_time_is_followed_at_once() -> None:
    device = Device()
    device.launch(STEP_S, expected_s=STEP_S)
    assert device.pace.is_due() and device.pace.is_due(with_prompts=True)
    device.step(0.0, expected_s=0.0)
    device.step(0.0, expected_s=0.0)
    assert device.pace.is_due(with_prompts=True)


def test_steps_launched_kernel_by_kernel_are_composed_earlier() -> None:
    device = Device()
    device.launch(STEP_S)
    for _ in range(3):
        device.step(STEP_S)
    idle_s = [device.step(4 * STEP_S, launch_s=3 * STEP_S, expected_s=4 * STEP_S, with_prompts=True) for _ in range(20)]
    assert idle_s == [0.0] * 20
    # The first one runs from the start of its launch or the previous end, not from the end of its launch.
    assert device.pace.due(with_prompts=True) < device.clock.now + STEP_S
    assert device.pace.due() == pytest.approx(device.clock.now + 4 * STEP_S - LEAD_S)


def test_step_seen_late_sets_the_start_of_the_next() -> None:
    device = Device()
    device.launch(STEP_S)
    for _ in range(3):
        device.step(STEP_S)
    began = device._ends[0][0]
    # The launch ends long after the running step, when most of the new one has run.
    device.step(4 * STEP_S, launch_s=3 * STEP_S, expected_s=4 * STEP_S)
    assert device.clock.now > began + 2 * STEP_S
    device.pace._multiples.append(1.0)
    assert device.pace.due() == pytest.approx(began + 4 * STEP_S - LEAD_S)


def test_polls_for_a_step_begin_near_its_shortest_recent_time() -> None:
    device = Device()
    device.launch(STEP_S)
    assert device.pace.earliest_end() == device.clock.now
    for _ in range(3):
        device.step(STEP_S)
    # It is the running step's end, not the one behind it.
    began = device.clock.now
    device.launch(STEP_S)
    assert device.pace.earliest_end() == pytest.approx(began + SHARE * STEP_S)


@pytest.mark.parametrize(("ratio", "counted"), [(0.5, 0.5), (10.0, 1.0)])
def test_polls_for_a_mixed_step_begin_before_its_expected_time(ratio: float, counted: float) -> None:
    device = Device()
    device.launch(ratio * STEP_S, expected_s=STEP_S)
    assert device.pace.earliest_end() == device.clock.now
    device.launch(2 * STEP_S, expected_s=2 * STEP_S)
    device.collect()
    assert device.pace.earliest_end() == pytest.approx(device.clock.now + SHARE * counted * 2 * STEP_S)


def test_host_time_is_lost_without_overlap() -> None:
    device = Device()
    assert device.pace.lost_s == 0.0
    device.launch(STEP_S)
    device.pace.collected(0.002)
    assert device.pace.lost_s == pytest.approx(HOST_S + 0.002)
    # Launches of mixed steps are no measure of others.
    device.launch(STEP_S, host_s=1.0, expected_s=STEP_S)
    assert device.pace.lost_s == pytest.approx(HOST_S + 0.002)
