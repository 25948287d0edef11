"""Steps with experts are concave in their rows. Chunks beside them keep the ITL objective at changing batch sizes."""

import math
import random
from collections.abc import Callable

import pytest

from tandem.both_worker.step_budget import StepBudget
from tandem.engine.models.experts import ExpertsConfig, Routing
from tandem.prefill_worker.budget import PromptRest
from tandem.worker.forward_timer import ForwardTimer
from tests.fakes.clock import FakeClock

CHUNK_SIZE, ENDLESS = 1024, 10**6
EXPERTS = ExpertsConfig(128, 768, Routing("softmax", 8))
# Reading all experts takes most of a step.
BASE_S, EXPERT_S = 0.0015, 0.017 / 128
PROMPTS_S, TOKEN_S, ATTENDED_S, REQUEST_S, KV_TOKEN_S = 0.0005, 8e-6, 1e-9, 1e-5, 2e-8
NUM_KV_TOKENS = 1500
NUM_STEPS, NUM_LEARNED_FROM = 2000, 200


def step_s(num_requests: int, num_tokens: int) -> float:
    seconds = BASE_S + REQUEST_S * num_requests + KV_TOKEN_S * NUM_KV_TOKENS * num_requests
    if num_tokens:
        seconds += PROMPTS_S + TOKEN_S * num_tokens + ATTENDED_S * num_tokens**2 / 2
    return seconds + EXPERT_S * EXPERTS.num_touched(num_requests + num_tokens)


def wave(step: int, rng: random.Random) -> int:
    return round(32.5 - 31.5 * math.cos(2 * math.pi * step / 200))


def few(step: int, rng: random.Random) -> int:
    return rng.randint(1, 16)


def jumps(step: int, rng: random.Random) -> int:
    return 2 if step // 100 % 2 else 64


def serve(
    objective_s: float, batch_size: Callable[[int, random.Random], int], experts: ExpertsConfig | None
) -> tuple[float, float]:
    """Run mixed steps, 30 % of which have prompts.

    Returns the share of steps with prompts that miss the objective, and prompt tokens per second.
    """
    clock, rng = FakeClock(0.0), random.Random(0)
    timer = ForwardTimer("cuda", clock, experts)
    budget = StepBudget(objective_s, CHUNK_SIZE, timer)
    timer.step_launched(1, 100)
    timer.step_ended()
    gaps: list[float] = []
    num_tokens, began = 0, 0.0
    for step in range(NUM_STEPS):
        num_requests, size = batch_size(step, rng), 0
        if step == NUM_LEARNED_FROM:
            num_tokens, began = 0, clock.now
            gaps.clear()
        if rng.random() < 0.3:
            size = budget.fit(iter([PromptRest(0, ENDLESS)]))[0]
            timer.prompts_launched(clock.now, size, size * size // 2)
        timer.step_launched(num_requests, NUM_KV_TOKENS * num_requests, is_mixed=size > 0)
        seconds = step_s(num_requests, size) * rng.gauss(1.0, 0.01)
        clock.advance(seconds)
        timer.step_ended()
        timer.times()
        if size:
            timer.prompts_ended(is_mixed=True)
            gaps.append(seconds)
            num_tokens += size
    return sum(gap > objective_s for gap in gaps) / len(gaps), num_tokens / (clock.now - began)


@pytest.mark.parametrize("batch_size", [wave, few, jumps])
@pytest.mark.parametrize("objective_s", [0.025, 0.030])
def test_gaps_stay_within_the_objective(objective_s: float, batch_size: Callable[[int, random.Random], int]) -> None:
    missed, _ = serve(objective_s, batch_size, EXPERTS)
    assert missed <= 0.01


def test_linear_fit_misses_the_objective() -> None:
    """The premise: without expert counts, the fit takes reading all experts for a time of every request."""
    assert serve(0.025, wave, None)[0] > 0.5
    assert serve(0.025, few, None)[0] > 0.3


def test_more_tokens_are_computed_in_time() -> None:
    assert serve(0.030, few, EXPERTS)[1] > 1.15 * serve(0.030, few, None)[1]


def test_separate_passes_read_experts_twice() -> None:
    clock = FakeClock(0.0)
    timer = ForwardTimer("cuda", clock, EXPERTS)
    both = EXPERTS.num_touched(8) + EXPERTS.num_touched(200)
    assert timer.num_experts(8, 200) == both
    timer.prompts_launched(clock.now, 200, 20_000)
    timer.step_launched(8, 1000)
    separate_s = timer.expected_s
    assert timer.num_experts(8, 200) == both
    timer.prompts_launched(clock.now, 200, 20_000)
    timer.step_launched(8, 1000, is_mixed=True)
    assert timer.num_experts(8, 200) == EXPERTS.num_touched(208)
    saved = both - EXPERTS.num_touched(208)
    assert separate_s - timer.expected_s == pytest.approx(saved * timer.fitted.expert_s)
    # A step between prompts tells nothing.
    timer.step_launched(8, 1000)
    assert timer.num_experts(8, 200) == EXPERTS.num_touched(208)


def test_expert_time_is_found_beside_the_published_linear_times() -> None:
    clock, rng = FakeClock(0.0), random.Random(1)
    timer = ForwardTimer("cuda", clock, EXPERTS)
    for _ in range(600):
        num_requests = rng.randint(1, 64)
        timer.step_launched(num_requests, NUM_KV_TOKENS * num_requests)
        clock.advance(step_s(num_requests, 0))
        timer.step_ended()
        timer.times()
    assert timer.fitted.expert_s == pytest.approx(EXPERT_S, rel=0.1)
    published = timer.times()
    assert type(published).__name__ == "ForwardTimes" and published.request_s > 5 * timer.fitted.request_s
