"""Chunks of workers of role both follow the workers' budget."""

from math import inf

import pytest

from tandem.deploy.estimate.both import BothSteps
from tandem.deploy.estimate.gpus import GPUS
from tandem.deploy.estimate.worker import Worker
from tandem.engine.mixed_sizes import NUM_PROMPT_TOKENS
from tests.fakes.model_shapes import LLAMA_8B

WORKER = Worker(LLAMA_8B, GPUS["h200"])
KV_LEN = 4224
PLAIN = [WORKER.decode_step(size, KV_LEN) for size in range(1, 201)]
STEPS = BothSteps(WORKER, PLAIN, 4096, KV_LEN, 0.025)


def test_chunks_are_within_the_limit_and_have_graphs() -> None:
    assert set(STEPS.chunk_sizes) <= set(NUM_PROMPT_TOKENS)
    assert STEPS.chunk_sizes == sorted(STEPS.chunk_sizes, reverse=True) and STEPS.chunk_sizes[0] > 128
    num_within = STEPS.num_within(4.0)
    for size in range(1, num_within + 1):
        assert PLAIN[size - 1] < STEPS.with_chunk[size - 1] <= 0.025
    assert STEPS.with_chunk[num_within] > 0.025


def test_rare_chunks_do_not_limit_the_batch() -> None:
    kv_len = 1152
    plain = [WORKER.decode_step(size, kv_len) for size in range(1, 65)]
    steps = BothSteps(WORKER, plain, 128, kv_len, 0.0065)
    assert steps.with_chunk[0] > 0.0065
    # 150 steps/s have 1.7 chunks, or 20.
    assert plain[steps.num_within(1.7) - 1] <= 0.0065 < plain[steps.num_within(1.7)]
    assert steps.num_within(20.0) == 0


def test_streams_beside_prompts_have_the_gaps_that_were_measured() -> None:
    # docs/reports/mixed-steps-h200: 64 streams halfway through 2,048 tokens, prompts of 4,096.
    kv_len = 1200
    plain = [WORKER.decode_step(size, kv_len) for size in range(1, 65)]
    steps = BothSteps(WORKER, plain, 4096, kv_len, 0.025)
    assert plain[-1] * 1e3 == pytest.approx(8.3, rel=0.15)
    assert steps.with_chunk[-1] * 1e3 == pytest.approx(21.4, rel=0.15)


def test_without_a_limit_prompts_are_computed_whole() -> None:
    assert set(BothSteps(WORKER, PLAIN, 4096, KV_LEN, inf).chunk_sizes) == {4096}


def test_the_mean_step_is_between_those_without_and_with_a_chunk() -> None:
    assert STEPS.steps(0.0) == pytest.approx(PLAIN)
    assert STEPS.steps(1000.0) == STEPS.with_chunk
    for plain, mean, took in zip(PLAIN, STEPS.steps(2.0), STEPS.with_chunk, strict=True):
        assert plain < mean <= took
