"""Chunks of workers of role both follow the workers' budget."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, takewhile
from math import inf, isnan, nan
from zlib import crc32

import pytest

from tandem.bench.measures import percentile
from tandem.deploy.estimate import both
from tandem.deploy.estimate.both import BothSteps, ChunkBudget
from tandem.deploy.estimate.gpus import GPUS
from tandem.deploy.estimate.rates import Load, splits
from tandem.deploy.estimate.worker import Worker
from tandem.engine.mixed_sizes import NUM_PROMPT_TOKENS
from tandem.engine.models.config import ModelConfig
from tests.fakes.model_shapes import LLAMA_8B, QWEN3_30B_A3B

WORKER = Worker(LLAMA_8B, GPUS["h200"])
MIXTURE = Worker(QWEN3_30B_A3B, GPUS["h200"])
KV_LEN = 4224
NUM_GAPS = 255
PLAIN = [WORKER.decode_step(size, KV_LEN) for size in range(1, 201)]
STEPS = BothSteps(WORKER, PLAIN, 4096, KV_LEN, 0.025, NUM_GAPS)
# Good shares at limits of 15 and 25 ms (docs/benchmarks.md): --itl-objective, cell, seconds of arrivals.
SERVED = {
    (QWEN3_30B_A3B, 0.025, "4096x256@0.4", 14): (1.0, 1.0),
    (QWEN3_30B_A3B, 0.025, "4096x256@0.8", 14): (1.0, 1.0),
    (QWEN3_30B_A3B, 0.025, "4096x256@1.3", 14): (0.636, 1.0),
    (QWEN3_30B_A3B, 0.025, "4096x256@2", 14): (0.167, 0.833),
    (QWEN3_30B_A3B, 0.015, "4096x256@0.4", 14): (0.8, 1.0),
    (QWEN3_30B_A3B, 0.015, "4096x256@0.8", 14): (0.667, 1.0),
    (LLAMA_8B, 0.015, "4096x256@4.5", 14): (0.765, 0.765),
    (LLAMA_8B, 0.025, "4096x256@6", 14): (nan, 0.962),
    (LLAMA_8B, 0.025, "4096x256@4.5", 15): (nan, 0.986),
    (LLAMA_8B, 0.025, "8256x256@2", 15): (nan, 0.897),
    (LLAMA_8B, 0.025, "8256x256@2.5", 15): (nan, 0.706),
}


def plain_of(worker: Worker, prompt_len: int) -> list[float]:
    return [worker.decode_step(size, prompt_len + 128) for size in range(1, 65)]


def steps_of(worker: Worker, itl: float = 0.015, prompt_len: int = 4096) -> BothSteps:
    return BothSteps(worker, plain_of(worker, prompt_len), prompt_len, prompt_len + 128, itl, NUM_GAPS)


def good_share(worker: Worker, prompt_len: int, arrivals: Sequence[float], itl: float, ttft: float = 0.5) -> float:
    """Replays arrivals with the estimated steps; whole prompts while nothing decodes."""
    plain = plain_of(worker, prompt_len)
    budget = ChunkBudget(worker, plain, prompt_len, prompt_len + 128, itl)

    @cache
    def chunk(batch_size: int, num_before: int) -> tuple[int, float]:
        size = min(prompt_len - num_before, budget.chunk_size(batch_size, num_before))
        return size, budget.took(size, batch_size, num_before)

    now, num_arrived, num_good = 0.0, 0, 0
    prompts: list[tuple[float, int]] = []
    running: list[tuple[bool, list[float]]] = []
    while prompts or running or num_arrived < len(arrivals):
        if not prompts and not running:
            now = max(now, arrivals[num_arrived])
        while num_arrived < len(arrivals) and arrivals[num_arrived] <= now:
            prompts.append((arrivals[num_arrived], prompt_len))
            num_arrived += 1
        if not running:
            took, size = worker.prefill(1, prompt_len), prompt_len
        elif prompts:
            size, took = chunk(len(running), prompt_len - prompts[0][1])
        else:
            took = plain[len(running) - 1]
        now += took
        for _, gaps in running:
            gaps.append(took)
        num_good += sum(
            in_time and percentile(sorted(gaps), 95) <= itl for in_time, gaps in running if len(gaps) == NUM_GAPS
        )
        running = [one for one in running if len(one[1]) < NUM_GAPS]
        if prompts:
            arrived, num_left = prompts.pop(0)
            if num_left > size:
                prompts.insert(0, (arrived, num_left - size))
            else:
                running.append((now - arrived <= ttft, []))
    return num_good / len(arrivals)


def poisson(seed: str, rate: float, seconds: float) -> list[float]:
    rng = random.Random(seed)
    gaps = iter(partial(rng.expovariate, rate), None)
    return list(takewhile(lambda moment: moment < seconds, accumulate(gaps)))


def test_chunks_meet_the_objective_and_have_graphs() -> None:
    budget = ChunkBudget(WORKER, PLAIN, 4096, KV_LEN, 0.025)
    sizes = [budget.chunk_size(batch_size, 2048) for batch_size in range(1, 101)]
    assert set(sizes) <= set(NUM_PROMPT_TOKENS)
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 128
    for batch_size, size in enumerate(sizes, 1):
        assert PLAIN[batch_size - 1] < budget.took(size, batch_size, 2048) <= 0.025
    # Tokens behind more tokens take longer.
    first, last = ([budget.chunk_size(size, before) for size in range(1, 33)] for before in (0, 3584))
    assert sum(first) > sum(last)


def test_chunks_that_cannot_meet_the_objective_take_about_as_long_as_the_step() -> None:
    plain = plain_of(MIXTURE, 4096)
    strict, loose = (ChunkBudget(MIXTURE, plain, 4096, KV_LEN, itl) for itl in (0.015, 0.025))
    size = strict.chunk_size(1, 2048)
    assert strict.took(size, 1, 2048) > 0.015
    assert 128 <= size < loose.chunk_size(1, 2048)
    assert strict.chunk_size(16, 2048) > size, "a longer step leaves more time"


def test_a_request_may_have_some_slow_steps() -> None:
    steps = steps_of(replace(MIXTURE, itl_objective=0.025))
    # A prompt is computed in 9 or 10 slow steps, and 12 of 255 gaps may be slow.
    assert 6 < steps.chunks[0].num_slow <= 12
    of_one = rates_of(steps)
    assert of_one == sorted(of_one) and of_one[0] < 0.001 and of_one[-1] > 0.75
    # Most requests with one prompt in their life are good, but not with chunks of another objective.
    more = rates_of(steps_of(replace(MIXTURE, itl_objective=0.015)))
    assert all(few < many for few, many in zip(of_one, more, strict=True))
    assert of_one[2] < 0.1 < 0.2 < more[2]


def rates_of(steps: BothSteps) -> list[float]:
    return [steps.slow_shares(rate)[0] for rate in (0.01, 0.1, 0.4, 1.0, 3.0)]


def test_no_request_is_slow_if_chunks_meet_the_limit_and_all_are_if_no_step_does() -> None:
    loose = steps_of(replace(MIXTURE, itl_objective=0.025), itl=0.025)
    assert loose.slow_shares(2.0)[:8] == [0.0] * 8
    tight = steps_of(MIXTURE, itl=0.002)
    assert set(tight.slow_shares(0.01)) == {1.0}
    shares = [steps_of(replace(MIXTURE, itl_objective=0.025), itl).slow_shares(1.0)[1] for itl in (0.003, 0.015, 0.025)]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("cell", SERVED, ids=lambda cell: f"{cell[0].architecture}-{cell[1]}-{cell[2]}")
def test_replayed_arrivals_have_the_good_shares_that_were_measured(
    monkeypatch: pytest.MonkeyPatch, cell: tuple[ModelConfig, float, str, int]
) -> None:
    # The measured workers filled 0.9 of the objective.
    monkeypatch.setattr(both, "FILLED", 0.9)
    model, objective, name, seconds = cell
    # As benchmarks.goodput draws them.
    arrivals = poisson(f"{crc32(f'{name} False'.encode())}/arrivals", float(name.partition("@")[2]), seconds)
    worker = Worker(model, GPUS["h200"], itl_objective=objective)
    for itl, measured in zip((0.015, 0.025), SERVED[cell], strict=True):
        if not isnan(measured):
            found = good_share(worker, int(name.partition("x")[0]), arrivals, itl)
            assert found == pytest.approx(measured, abs=0.1)


@pytest.mark.parametrize(("objective", "itl"), [(0.025, 0.015), (0.025, 0.025), (0.015, 0.015)])
def test_the_estimated_rate_has_about_the_good_share_when_simulated(objective: float, itl: float) -> None:
    worker = replace(MIXTURE, itl_objective=objective)
    (split,) = splits(worker, Load(4096, 256, ttft=0.5, itl=itl), 1)
    assert good_share(worker, 4096, poisson("9", split.rate, 1500 / split.rate), itl) == pytest.approx(0.9, abs=0.05)


def test_streams_beside_prompts_have_the_gaps_that_were_measured() -> None:
    # docs/reports/mixed-steps-h200: 64 streams halfway through 2,048 tokens, prompts of 4,096.
    kv_len = 1200
    plain = [WORKER.decode_step(size, kv_len) for size in range(1, 65)]
    steps = BothSteps(WORKER, plain, 4096, kv_len, 0.025, 2047)
    assert plain[-1] * 1e3 == pytest.approx(8.3, rel=0.15)
    assert steps.chunks[-1].seconds / steps.chunks[-1].number * 1e3 == pytest.approx(21.4, rel=0.15)


def test_without_a_limit_prompts_are_computed_whole() -> None:
    steps = BothSteps(WORKER, PLAIN, 4096, KV_LEN, inf, NUM_GAPS)
    assert {chunks.number for chunks in steps.chunks} == {1.0}


def test_the_mean_step_is_between_those_without_and_with_a_chunk() -> None:
    assert STEPS.steps(0.0) == pytest.approx(PLAIN)
    with_chunk = [chunks.seconds / chunks.number for chunks in STEPS.chunks]
    assert STEPS.steps(1000.0) == with_chunk
    for plain, mean, took in zip(PLAIN, STEPS.steps(2.0), with_chunk, strict=True):
        assert plain < mean <= took
