"""Drafts by acceptance and step times, on a clock that follows a cost model."""

from collections.abc import Iterator

import pytest

from tandem.decode_worker.draft_acceptance import START, AcceptanceMeans
from tandem.decode_worker.draft_policy import MAX_DRAFTS, DraftPolicy
from tandem.decode_worker.overlap_price import FEWEST, MAX_AGE, OverlapPrice, StepTime
from tandem.decode_worker.pacing import StepPace
from tandem.engine.draft_costs import DraftCosts
from tandem.worker.forward_timer import INTERVAL_S, ForwardTimer
from tests.fakes.clock import FakeClock

STEP_S = 0.025
# With and without rows that cost little beside the weights.
ROW_S = (0.0002, 0.004)
CONTEXT = 100
SOURCE = "ngram"


class Device:
    """Runs steps whose time grows with their rows."""

    def __init__(self, row_s: float, objective_s: float = 0.0) -> None:
        self.row_s = row_s
        self.clock = FakeClock()
        self.timer = ForwardTimer("cpu", self.clock)
        self.policy = DraftPolicy(self.timer, objective_s)
        self.means = AcceptanceMeans()

    def step_s(self, num_rows: int) -> float:
        return STEP_S + self.row_s * num_rows

    def run(self, num_rows: int, num_requests: int) -> float:
        self.timer.step_launched(num_rows, num_requests * CONTEXT)
        seconds = self.step_s(num_rows)
        self.clock.advance(seconds)
        self.timer.step_ended()
        return seconds

    def measure(self) -> None:
        """Lets the timer see batches of several sizes."""
        for number in range(200):
            self.run(1 + number % 12, 1)

    def choose(self, acceptances: list[float], num_requests: int) -> list[int]:
        proposals = [(acceptance, MAX_DRAFTS) for acceptance in acceptances]
        return self.policy.choose(proposals, num_requests, num_requests * CONTEXT)


def test_nothing_is_drafted_before_a_step_is_measured() -> None:
    device = Device(ROW_S[0])
    assert device.choose([1.0], 1) == [0]
    device.measure()
    device.clock.advance(INTERVAL_S)
    assert device.choose([1.0], 1) == [MAX_DRAFTS]


@pytest.mark.parametrize("row_s", ROW_S)
def test_wrong_drafts_end_by_themselves(row_s: float) -> None:
    device = Device(row_s)
    device.measure()
    spent = plain = 0.0
    # Requests one after the other.
    for _ in range(10):
        acceptance = device.means.usual(SOURCE)
        for _ in range(100):
            [count] = device.choose([acceptance], 1)
            spent += device.run(1 + count, 1)
            plain += device.step_s(1)
            acceptance = device.means.observe(SOURCE, acceptance, [7] * MAX_DRAFTS, [8])
    assert count == 0 and spent < 1.02 * plain


def test_right_drafts_return_without_a_forward_pass_for_the_attempt() -> None:
    device = Device(ROW_S[1])
    device.measure()
    acceptance = 0.0
    assert device.choose([acceptance], 1) == [0]
    # The tokens of steps without drafts were proposed.
    for _ in range(16):
        acceptance = device.means.observe(SOURCE, acceptance, [7, 7], [7])
    [count] = device.choose([acceptance], 1)
    assert count > 0
    gained = sum(acceptance**depth for depth in range(count + 1))
    assert gained / device.step_s(1 + count) > 1.2 / device.step_s(1)


def test_the_likelier_drafts_go_first() -> None:
    device = Device(ROW_S[1])
    device.measure()
    low, high, none = device.choose([0.5, 0.9, 0.01], 3)
    assert high > low > none == 0


def test_large_batches_get_fewer_drafts_if_rows_cost_time() -> None:
    device = Device(ROW_S[1])
    device.measure()
    counts = [sum(device.choose([0.7] * num_requests, num_requests)) / num_requests for num_requests in (1, 4, 64)]
    assert counts[0] > counts[1] > counts[2] == 0.0


def test_drafts_keep_the_objective_where_plain_steps_do() -> None:
    for objective_s, most in ((0.0, MAX_DRAFTS), (0.045, 3), (0.02, MAX_DRAFTS)):
        device = Device(ROW_S[1], objective_s)
        device.measure()
        [count] = device.choose([1.0], 1)
        assert count == pytest.approx(most, abs=1), objective_s
        assert not 0.0 < objective_s > device.step_s(1) or device.step_s(1 + count) <= objective_s


def test_acceptance_counts_up_to_the_first_wrong_draft() -> None:
    means = AcceptanceMeans()
    once = means.observe(SOURCE, START, [7], [7])
    assert means.observe(SOURCE, START, [7, 8, 9], [7]) == once > START
    # The tokens behind a wrong draft say nothing of later ones.
    assert (
        means.observe(SOURCE, START, [7, 8, 9, 9], [7, 9, 9, 9]) == means.observe(SOURCE, START, [7, 8], [7, 9]) < once
    )
    assert means.observe(SOURCE, START, [], [7]) == START


def test_a_source_that_is_wrong_takes_nothing_from_another() -> None:
    means = AcceptanceMeans()
    for _ in range(100):
        means.observe("shared", START, [7], [8])
    assert means.usual("shared") < 0.2 < means.usual(SOURCE) == START


class Pace(StepPace):
    """Attributes: host_s: reported as lost."""

    host_s = 0.0

    @property
    def lost_s(self) -> float:
        return self.host_s


def passed(
    device: Device, seconds: float = STEP_S, num_tokens: int = 1, *, has_drafts: bool = False, has_prompts: bool = False
) -> None:
    """Lets the policy see a step of one request, which overlaps unless it has drafts."""
    step = StepTime(seconds, 1, num_tokens, has_drafts, overlaps=not has_drafts, has_prompts=has_prompts)
    device.policy.timed(step)


def num_rested(device: Device, acceptance: float = 0.5) -> int:
    """Returns the steps until drafts return."""
    number = 0
    while not device.choose([acceptance], 1)[0]:
        passed(device)
        number += 1
    return number


@pytest.fixture
def overlapping() -> Iterator[tuple[Device, Pace]]:
    """A device whose steps overlap unless they have drafts."""
    device = Device(ROW_S[0])
    device.measure()
    device.clock.advance(INTERVAL_S)
    pace = Pace(device.clock)
    device.policy = DraftPolicy(device.timer, 0.0, price=OverlapPrice(pace))
    for _ in range(FEWEST):
        assert device.choose([1.0], 1) == [0]
        passed(device)
    yield device, pace


def test_lost_overlap_is_part_of_the_price(overlapping: tuple[Device, Pace]) -> None:
    device, pace = overlapping
    assert device.choose([0.5], 1)[0] > 1
    # 4 % of a step, beside the caution, for 3 % more tokens, then 20 % for nearly twice as many.
    pace.host_s = 0.04 * STEP_S
    assert device.choose([0.03], 1) == [0]
    pace.host_s = 0.2 * STEP_S
    assert device.choose([0.5], 1)[0] > 2
    pace.host_s = STEP_S
    assert device.choose([0.5], 1) == [0]


def test_drafts_that_lose_time_end_and_are_tried_again(overlapping: tuple[Device, Pace]) -> None:
    device, _ = overlapping
    num_drafted = 0
    while device.choose([0.5], 1)[0]:
        # More than twice the expected time: outliers count no more than that.
        passed(device, 5 * STEP_S, 2, has_drafts=True)
        num_drafted += 1
    assert 2 <= num_drafted <= 8
    assert 1 <= num_rested(device) <= 1000
    # Once they take what is expected, they go on.
    for _ in range(50):
        assert device.choose([0.5], 1)[0]
        passed(device, 1.1 * STEP_S, 2, has_drafts=True)


def test_drafts_that_are_accepted_less_than_expected_end(overlapping: tuple[Device, Pace]) -> None:
    device, pace = overlapping
    pace.host_s = 0.5 * STEP_S
    num_drafted = 0
    while device.choose([0.5], 1)[0]:
        passed(device, 1.5 * STEP_S, 1, has_drafts=True)
        num_drafted += 1
    # One request's tokens tell little each.
    assert 2 <= num_drafted <= 300


def test_no_drafts_while_prompts_join_many_steps(overlapping: tuple[Device, Pace]) -> None:
    device, _ = overlapping
    passed(device, has_prompts=True)
    once = num_rested(device)
    for _ in range(5):
        passed(device, has_prompts=True)
        passed(device)
    assert 1 <= once <= 100 < num_rested(device) <= 1000


def test_steps_without_drafts_are_measured_again(overlapping: tuple[Device, Pace]) -> None:
    device, _ = overlapping
    # Prompts in a step, and the end of one that did not overlap, say nothing of it.
    passed(device, 10 * STEP_S, has_prompts=True)
    num_rested(device)
    device.policy.timed(StepTime(10 * STEP_S, 1, 1, has_drafts=False, overlaps=False, has_prompts=False))
    assert device.choose([0.5], 1)[0]
    for _ in range(MAX_AGE):
        passed(device, 1.1 * STEP_S, 6, has_drafts=True)
        assert device.choose([0.9], 1)[0]
    passed(device, 1.1 * STEP_S, 6, has_drafts=True)
    for _ in range(FEWEST):
        assert device.choose([0.9], 1) == [0]
        # Faster than before.
        passed(device, STEP_S / 4)
    assert device.choose([0.5], 1)[0]


def test_each_batch_size_is_measured(overlapping: tuple[Device, Pace]) -> None:
    device, _ = overlapping
    assert device.choose([0.9], 1)[0] and not any(device.choose([0.9] * 2, 2))


def test_drafts_fill_the_measured_sizes() -> None:
    device = Device(ROW_S[0])
    device.measure()
    device.clock.advance(INTERVAL_S)
    costs = DraftCosts({1: STEP_S, 4: STEP_S}, {2: STEP_S, 8: 1.1 * STEP_S, 16: 3 * STEP_S})
    device.policy = DraftPolicy(device.timer, 0.0, costs)
    # Within a size, more drafts cost nothing. The next size costs more than it gains.
    assert device.choose([0.9], 1) == [MAX_DRAFTS]
    assert sum(device.choose([0.9, 0.9, 0.8, 0.1], 4)) == 4
    assert device.choose([0.05], 1) == [1]


def test_unknown_tokens_must_be_right_first(overlapping: tuple[Device, Pace]) -> None:
    device, pace = overlapping
    pace.host_s = 0.25 * STEP_S
    proposals, context = [(0.4, MAX_DRAFTS)], CONTEXT
    assert device.policy.choose(proposals, 1, context)[0] > 0
    assert device.policy.choose(proposals, 1, context, num_unknown=1) == [0]
    assert device.policy.choose([(1.0, MAX_DRAFTS)], 1, context, num_unknown=1) == [MAX_DRAFTS - 1]
    assert device.policy.choose([(1.0, 1)], 1, context, num_unknown=1) == [0]
    # No request may need another step.
    assert device.policy.choose([], 0, 0, num_unknown=1) == []


def test_drafts_again_behind_wrong_ones_are_worth_the_wait(overlapping: tuple[Device, Pace]) -> None:
    device, pace = overlapping
    pace.host_s = 0.5 * STEP_S
    for has_drafts in (False, True):
        for _ in range(500):
            device.policy.renewed(has_drafts=has_drafts)
        [count] = device.policy.choose([(0.6, MAX_DRAFTS)], 1, CONTEXT, num_unknown=1)
        assert (count > 0) == has_drafts
