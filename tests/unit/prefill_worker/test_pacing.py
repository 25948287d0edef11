"""Earliest plausible ends of prefill passes."""

import pytest

from tandem.prefill_worker.pacing import SHARE, WINDOW, PromptPace
from tests.fakes.clock import FakeClock


def run(pace: PromptPace, clock: FakeClock, expected_s: float, duration_s: float, late_s: float = 0.0) -> None:
    pace.launched(clock.now, expected_s)
    clock.advance(duration_s + late_s)
    pace.ended(duration_s)


def test_without_experience_polls_begin_with_the_pass() -> None:
    clock = FakeClock(5.0)
    pace = PromptPace(clock)
    pace.launched(clock.now, 0.1)
    assert pace.earliest_end() == 5.0


def test_smallest_recent_ratio_of_measured_to_expected_counts() -> None:
    clock = FakeClock(0.0)
    pace = PromptPace(clock)
    for ratio in (1.0, 0.5, *[0.8] * (WINDOW - 1)):
        run(pace, clock, 0.1, 0.1 * ratio)
    pace.launched(clock.now, 0.2)
    assert pace.earliest_end() - clock.now == pytest.approx(SHARE * 0.5 * 0.2)
    clock.advance(0.16)
    pace.ended(0.16)
    pace.launched(clock.now, 0.2)
    assert pace.earliest_end() - clock.now == pytest.approx(SHARE * 0.8 * 0.2)


def test_polls_begin_before_the_expected_end_however_long_the_first_pass_took() -> None:
    clock = FakeClock(0.0)
    pace = PromptPace(clock)
    run(pace, clock, 0.03, 0.3)
    # The fit has learned from that pass.
    pace.launched(clock.now, 0.3)
    assert pace.earliest_end() - clock.now == pytest.approx(SHARE * 0.3)


def test_late_notice_teaches_no_later_ends() -> None:
    clock = FakeClock(0.0)
    pace = PromptPace(clock)
    for _ in range(WINDOW):
        run(pace, clock, 0.1, 0.1, late_s=0.5)
    pace.launched(clock.now, 0.1)
    assert pace.earliest_end() - clock.now == pytest.approx(SHARE * 0.1)


def test_pass_begins_with_the_end_of_the_previous_one() -> None:
    clock = FakeClock(0.0)
    pace = PromptPace(clock)
    run(pace, clock, 0.1, 0.1)
    pace.launched(clock.now, 0.1)
    pace.launched(clock.now, 0.1)
    first = pace.earliest_end()
    assert first == pytest.approx(0.1 + SHARE * 0.1)
    # Its end is noticed 20 ms late, but the next pass began in time.
    clock.advance(0.12)
    pace.ended(0.1)
    assert pace.earliest_end() == pytest.approx(0.2 + SHARE * 0.1)
