"""Depth of a model's drafts by acceptance and times."""

from typing import cast

import pytest

from tandem.decode_worker.draft_depth import PROBE_STEPS, DraftDepth
from tandem.decode_worker.overlap_price import FEWEST, OverlapPrice, StepTime
from tandem.decode_worker.pacing import StepPace
from tandem.engine.draft_costs import DraftCosts
from tandem.messages import ForwardTimes
from tandem.worker.forward_timer import ForwardTimer
from tests.fakes.clock import FakeClock

# A step of one request takes 11 ms.
TIMES = ForwardTimes(step_s=0.010, request_s=0.001)


class Timer:
    def __init__(self, times: ForwardTimes) -> None:
        self._times = times

    def times(self) -> ForwardTimes:
        return self._times


def depth_of(times: ForwardTimes = TIMES, objective_s: float = 0.0, pass_s: float = 0.002) -> DraftDepth:
    depth = DraftDepth(cast(ForwardTimer, Timer(times)), objective_s)
    if pass_s:
        # The mean of all steps forgets them.
        for seconds in (pass_s, *[0.0] * 200):
            depth.drafted(int(seconds > 0), seconds)
        depth.drafted(1, pass_s)
    return depth


def test_drafts_are_as_deep_as_they_gain_time() -> None:
    assert depth_of().choose([(1.0, 4)], 1, 100) == 4
    assert depth_of().choose([(1.0, 2)], 1, 100) == 2
    # The second draft of three milliseconds is right with a chance of a quarter.
    assert depth_of().choose([(0.5, 4)], 1, 100) == 1
    assert depth_of().choose([(0.1, 4)], 1, 100) == 0
    assert depth_of().choose([], 1, 100) == 0


def test_a_slow_drafter_and_a_large_batch_have_none() -> None:
    assert depth_of(pass_s=0.02).choose([(0.9, 4)], 1, 100) == 0
    # A pass is shared by all requests, but each row has its price.
    assert depth_of(pass_s=0.02).choose([(0.9, 4)] * 16, 16, 100) == 0
    cheap_rows = ForwardTimes(step_s=0.010, request_s=0.0001)
    assert depth_of(cheap_rows, pass_s=0.002).choose([(0.9, 4)] * 16, 16, 100) == 4


def test_drafting_is_part_of_the_measured_time_of_steps() -> None:
    timed = depth_of(ForwardTimes(step_s=0.018, request_s=0.001))
    for _ in range(200):
        timed.drafted(4, 0.008)
    assert timed.choose([(0.5, 4)], 1, 100) == depth_of().choose([(0.5, 4)], 1, 100)


@pytest.mark.parametrize("request_s", [0.0, 0.001])
def test_drafting_may_take_longer_than_the_fit_has_seen(request_s: float) -> None:
    depth = depth_of(ForwardTimes(step_s=0.001, request_s=request_s))
    for _ in range(20):
        depth.drafted(1, 0.01)
    assert depth.choose([(0.9, 4)], 1, 100) == 0


def test_fit_without_a_time_per_step_is_a_fit() -> None:
    rows_alone = ForwardTimes(request_s=0.01)
    assert depth_of(rows_alone).choose([(0.9, 4)], 1, 100) == 0


def test_objective_is_a_limit_unless_it_is_missed_anyway() -> None:
    assert depth_of(objective_s=0.020).choose([(1.0, 4)], 1, 100) == 2
    assert depth_of(objective_s=0.001).choose([(1.0, 4)], 1, 100) == 4


def test_first_steps_measure() -> None:
    assert depth_of(ForwardTimes(), pass_s=0.0).choose([(0.5, 4)], 1, 100) == 1
    assert depth_of(pass_s=0.0).choose([(0.5, 4)], 1, 100) == 1


def test_acceptance_stays_known_where_drafts_lose() -> None:
    depth = depth_of()
    chosen = []
    for _ in range(2 * PROBE_STEPS + 2):
        chosen.append(depth.choose([(0.01, 4)], 1, 100))
        depth.drafted(chosen[-1], 0.002 * chosen[-1])
    assert sum(chosen) == 2 and max(chosen) == 1


def test_first_steps_take_the_measured_time_of_passes() -> None:
    costs = DraftCosts({1: 0.011, 16: 0.012}, {2: 0.011, 8: 0.011, 128: 0.013}, {1: 0.001, 16: 0.02})
    depth = DraftDepth(cast(ForwardTimer, Timer(TIMES)), 0.0, costs)
    assert depth.choose([(0.9, 4)], 1, 100) == 4
    assert depth.choose([(0.1, 4)] * 16, 16, 100) == 0
    # The host adds to each step, not to each pass.
    for _ in range(200):
        depth.drafted(1, 0.003, 1)
    for _ in range(200):
        depth.drafted(0, 0.0)
    assert depth.choose([(0.8, 4)], 1, 100) == 4
    for _ in range(100):
        depth.drafted(1, 0.041, 1)
        depth.drafted(0, 0.0)
    assert depth.choose([(0.9, 4)], 1, 100) == 0


class Overlapping:
    """A depth whose steps overlap unless they have drafts. The fit knows nothing of steps without drafts."""

    def __init__(self, objective_s: float = 0.0) -> None:
        self.price = OverlapPrice(StepPace(FakeClock()))
        costs = DraftCosts({1: 0.010, 8: 0.010}, {2: 0.011, 64: 0.011}, {1: 0.002, 8: 0.002})
        times = ForwardTimes(step_s=1e-6, request_s=1e-6)
        self.depth = DraftDepth(cast(ForwardTimer, Timer(times)), objective_s, costs, self.price)

    def passed(self, seconds: float, num_requests: int = 1, *, has_prompts: bool = False) -> None:
        for _ in range(FEWEST):
            self.price.passed(
                StepTime(seconds, num_requests, 1, has_drafts=False, overlaps=True, has_prompts=has_prompts)
            )

    def choose(self, acceptance: float, num_requests: int = 1) -> int:
        return self.depth.choose([(acceptance, 4)] * num_requests, num_requests, 100)


def test_where_steps_overlap_those_without_drafts_are_measured_first() -> None:
    overlapping = Overlapping()
    assert overlapping.choose(1.0) == 0
    overlapping.passed(0.010)
    assert overlapping.choose(1.0) == 4 and overlapping.choose(1.0, 8) == 0
    overlapping.passed(0.010, 8)
    assert overlapping.choose(1.0, 8) == 4
    # No request may need another step.
    assert overlapping.depth.choose([], 0, 0) == 0


def test_where_steps_overlap_drafting_is_no_part_of_those_without_drafts() -> None:
    # A draft costs 3 ms, and 5 % of the step for caution.
    for plain_s, acceptance, expected in ((0.010, 0.4, 1), (0.010, 0.3, 0), (0.004, 0.7, 0), (0.004, 0.9, 1)):
        overlapping = Overlapping()
        overlapping.passed(plain_s)
        for _ in range(200):
            overlapping.depth.drafted(1, 0.002, 1)
        assert min(1, overlapping.choose(acceptance)) == expected


@pytest.mark.parametrize(("seconds", "num_tokens"), [(0.025, 2), (0.014, 1)], ids=["slow", "wrong"])
def test_where_steps_overlap_drafts_that_gain_less_than_expected_end(seconds: float, num_tokens: int) -> None:
    overlapping = Overlapping()
    overlapping.passed(0.010)
    num_steps = 0
    while overlapping.choose(0.6):
        step = StepTime(seconds, 1, num_tokens, has_drafts=True, overlaps=False, has_prompts=False)
        overlapping.depth.timed(step)
        num_steps += 1
    assert 2 <= num_steps <= 300
    # They are tried again.
    num_steps = 0
    while not overlapping.choose(0.6):
        overlapping.passed(0.010)
        num_steps += 1
    assert 1 <= num_steps <= 1000


def test_where_steps_overlap_prompts_and_the_objective_limit_the_time_of_drafts() -> None:
    overlapping = Overlapping(objective_s=0.020)
    overlapping.passed(0.010)
    assert overlapping.choose(1.0) == 3
    overlapping.passed(0.010, has_prompts=True)
    depths = []
    for _ in range(400):
        overlapping.passed(0.010)
        depths.append(overlapping.choose(1.0))
    # Longer steps would be joined by prompts too often, at first.
    assert depths == sorted(depths) and {*depths} == {0, 1, 2, 3}


@pytest.mark.parametrize("costs", [None, DraftCosts({1: 0.01}, {2: 0.011, 8: 0.011}, {1: 0.001})])
def test_pause_of_the_host_ends_no_drafts(costs: DraftCosts | None) -> None:
    depth = DraftDepth(cast(ForwardTimer, Timer(TIMES)), 0.0, costs)
    # A lasting time counts, however long. Then there are probes alone.
    for pauses_s, expected in (([], 4), ([1.0], 4), ([0.1] * 100, 1)):
        for seconds in (*[0.002] * 20, *pauses_s):
            depth.drafted(1, seconds, 1)
        # The mean of all steps forgets them.
        for _ in range(200):
            depth.drafted(0, 0.0)
        assert depth.choose([(0.9, 4)], 1, 100) == expected


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_no_draft_is_chosen_beyond_the_most(acceptance: float) -> None:
    depth = depth_of()
    assert all(depth.choose([(acceptance, 1), (acceptance, 0)], 2, 9) <= 1 for _ in range(PROBE_STEPS + 1))
