"""`--speculation auto` and drafts by a model on a GPU in virtual time: against `off`, none loses in any batch."""

import random
from functools import cache

import pytest

from tandem.decode_worker.speculation import AUTO_SPECULATION, NO_SPECULATION
from tests.fakes.timed_gpu import PLAIN_S, TimedGpu, TimedWorker, Times

WARMUP_S, MEASURED_S = 0.4, 0.4
LEAST_RATE = 0.98
# As measured at the start of a worker, and slower.
SHARES = (1.0, 1.3)
SLOW_BATCH_SIZES = (4, 64, 200, 255, 256)
CASES = [(size, acceptance) for size in (1, 8, 32, 128) for acceptance in (0.0, 0.5, 0.8, 1.0)]
# What a draft gains for sure.
GAINS = {(1, 0.8): 2.5, (8, 0.8): 2.2, (32, 0.8): 1.5, (1, 1.0): 5.0, (32, 1.0): 2.8}
# Drafts by a model. Probes of acceptance, which do not overlap, may cost more than right drafts of a large batch gain.
MODEL, LEAST_MODEL_RATE = "mtp", 0.97
MODEL_GAINS = {(1, 0.8): 1.8, (8, 0.8): 1.7, (32, 0.8): 1.5, (1, 1.0): 3.0, (8, 1.0): 2.6, (32, 1.0): 2.1}
SLOW_HOST = Times(launch_s=1.6e-3, drafting_s=1.5e-3)
NUM_STREAMS = 64
# Of prompts, per second.
RATE, ARRIVALS_S = 4.0, 4.0


def rate(batch_size: int, speculation: str, acceptance: float, times: Times) -> float:
    worker = TimedWorker(batch_size, speculation, acceptance, times, mixes=True)
    worker.run(WARMUP_S)
    worker.forget()
    worker.run(MEASURED_S)
    return worker.num_tokens / MEASURED_S


@cache
def off(batch_size: int) -> float:
    return rate(batch_size, NO_SPECULATION, 0.0, Times())


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    ("batch_size", "acceptance"),
    [
        *CASES,
        *(
            pytest.param(size, acceptance, marks=pytest.mark.slow)
            for size in SLOW_BATCH_SIZES
            for acceptance in (0.0, 0.3, 0.5, 0.7, 0.9, 1.0)
        ),
    ],
)
def test_no_batch_loses_tokens_per_second(batch_size: int, acceptance: float, share: float) -> None:
    found = rate(batch_size, AUTO_SPECULATION, acceptance, Times(drafted_share=share)) / off(batch_size)
    assert found >= max(LEAST_RATE, GAINS.get((batch_size, acceptance), 0.0) / share)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("batch_size", "acceptance"), CASES)
def test_drafts_by_a_model_lose_little_in_any_batch(batch_size: int, acceptance: float, share: float) -> None:
    found = rate(batch_size, MODEL, acceptance, Times(drafted_share=share)) / off(batch_size)
    assert found >= max(LEAST_MODEL_RATE, MODEL_GAINS.get((batch_size, acceptance), 0.0) / share)


@pytest.mark.parametrize("seed", range(3))
def test_few_wrong_drafts_by_a_model_do_not_end_those_that_gain(seed: int) -> None:
    """Without drafts, only one step in 64 observes acceptance."""
    gain, drop = 0.6, 0.1
    for acceptance, least in ((gain, 1.2), (drop, LEAST_MODEL_RATE)):
        worker = TimedWorker(1, MODEL, acceptance, Times(), mixes=True, seed=seed)
        worker.run(WARMUP_S)
        worker.forget()
        worker.run(5 * MEASURED_S)
        assert worker.num_tokens / (5 * MEASURED_S) > least * off(1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_slow_host_does_not_end_drafts_by_a_model_that_gain(batch_size: int, seed: int) -> None:
    """Its first drafts would not gain with half of them wrong."""
    worker = TimedWorker(batch_size, MODEL, 0.75, SLOW_HOST, mixes=True, seed=seed)
    worker.run(WARMUP_S)
    worker.forget()
    worker.run(MEASURED_S)
    assert worker.num_tokens / MEASURED_S > 1.1 * off(batch_size)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("batch_size", [1, 8])
def test_drafts_by_a_model_begin_again_when_they_gain(batch_size: int, seed: int) -> None:
    worker = TimedWorker(batch_size, MODEL, 0.75, SLOW_HOST, mixes=True, seed=seed)
    worker.run(WARMUP_S)
    worker.acceptance = 0.1
    worker.run(0.6)
    worker.acceptance = 0.75
    worker.run(1.0)
    worker.forget()
    worker.run(MEASURED_S)
    assert worker.num_tokens / MEASURED_S > 1.1 * off(batch_size)


@pytest.mark.parametrize("batch_size", [1, 8])
def test_wrong_drafts_by_a_model_end_soon(batch_size: int) -> None:
    worker = TimedWorker(batch_size, MODEL, 0.0, SLOW_HOST, mixes=True)
    worker.run(0.5)
    assert worker.num_tokens / 0.5 > 0.85 * off(batch_size)


def test_steps_without_room_for_drafts_by_a_model_overlap() -> None:
    """Probes of acceptance need room too."""
    num_streams = TimedGpu.max_drafted_rows
    worker = TimedWorker(num_streams, MODEL, 0.0, Times(), mixes=True)
    # Prompts forbid drafts for a while.
    worker.run(2.0)
    assert max(worker.gaps_s[-num_streams:]) < 1.2 * PLAIN_S[num_streams]


@pytest.mark.parametrize("batch_size", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_slow_searches_for_drafts_lose_no_tokens_per_second(batch_size: int) -> None:
    """For all requests of a step they would take longer than the step."""
    found = rate(batch_size, AUTO_SPECULATION, 0.0, Times(search_s=7e-5))
    assert found >= LEAST_RATE * off(batch_size)


def percentile(speculation: str, acceptance: float, *, mixes: bool) -> float:
    worker = TimedWorker(NUM_STREAMS, speculation, acceptance, Times(), mixes=mixes)
    rng, arrivals = random.Random(0), [0.0]
    while arrivals[-1] < ARRIVALS_S:
        arrivals.append(arrivals[-1] + rng.expovariate(RATE))
    worker.run(WARMUP_S)
    worker.forget()
    worker.run(ARRIVALS_S, arrivals)
    return sorted(worker.gaps_s)[len(worker.gaps_s) * 99 // 100]


@pytest.mark.parametrize("mixes", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["mixed steps", "apart"])
def test_gaps_beside_prompts_grow_no_longer(mixes: bool) -> None:
    most_s = 1.02 * percentile(NO_SPECULATION, 0.0, mixes=mixes)
    assert percentile(AUTO_SPECULATION, 0.8, mixes=mixes) <= most_s
