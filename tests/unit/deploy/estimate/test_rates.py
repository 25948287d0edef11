"""How GPUs are shared out, against laws that hold for any model and what was measured on four H200s."""

import random
from itertools import pairwise
from math import inf

import pytest

from deploy.estimate.gpus import GPUS
from deploy.estimate.rates import (
    Load,
    Split,
    decode_rate,
    largest_batch,
    max_utilisation,
    prefill_rate,
    splits,
    splits_for,
)
from deploy.estimate.worker import Worker
from tests.fakes.model_shapes import LLAMA_8B

WORKER = Worker(LLAMA_8B, GPUS["h200"])
LOAD = Load(4096, 256, ttft=0.5, itl=0.025)


def rate_of(found: list[Split], name: str) -> float:
    (rate,) = [split.rate for split in found if str(split) == name]
    return rate


def test_four_gpus_give_about_what_was_measured() -> None:
    # docs/estimate.md has these: the highest rates at which 90 % of the requests were good.
    found = splits(WORKER, LOAD, 4)
    assert rate_of(found, "3:1") == pytest.approx(22, rel=0.15)
    assert rate_of(found, "2:2") == pytest.approx(15.5, rel=0.15)
    assert str(found[0]) == "3:1"
    # There the mean of a request's gaps had a limit of 25 ms, and prompts were computed whole.
    without_itl = splits(WORKER, Load(4096, 256, ttft=0.5), 4)
    assert rate_of(without_itl, "4 both") == pytest.approx(27, rel=0.15)


def test_all_ways_are_there_and_the_best_comes_first() -> None:
    found = splits(WORKER, LOAD, 4)
    assert sorted(str(split) for split in found) == ["1:3", "2:2", "3:1", "4 both"]
    assert [split.rate for split in found] == sorted((split.rate for split in found), reverse=True)
    assert [str(split) for split in splits(WORKER, LOAD, 1)] == ["1 both"]


def test_the_fewest_gpus_are_found() -> None:
    found = splits_for(WORKER, LOAD, 30.0)
    num_gpus = found[0].num_prefill + found[0].num_decode + found[0].num_both
    assert found[0].rate >= 30.0
    assert splits(WORKER, LOAD, num_gpus - 1)[0].rate < 30.0
    assert splits_for(WORKER, Load(4096, 256, ttft=0.05), 1.0) == []


def test_a_decode_batch_keeps_to_the_limit_and_to_the_pool() -> None:
    size = largest_batch(WORKER, LOAD)
    assert WORKER.decode_step(size, LOAD.kv_len) <= 0.025 < WORKER.decode_step(size + 1, LOAD.kv_len)
    without = Load(4096, 256)
    assert largest_batch(WORKER, without) == WORKER.pool_tokens("decode", 1) // 4352
    assert largest_batch(Worker(LLAMA_8B, GPUS["h200"], max_batch_size=10), without) == 10
    # A step cannot be shorter than the time to read the weights.
    assert largest_batch(WORKER, Load(4096, 256, itl=0.003)) == 0
    assert decode_rate(WORKER, Load(4096, 256, itl=0.003)) == 0
    assert decode_rate(WORKER, Load(4096, 1)) == inf


def test_stricter_limits_give_no_higher_rate() -> None:
    for name in ("ttft", "itl"):
        for limits in pairwise([0.1, 0.05, 0.025, 0.015, 0.01]):
            loose, strict = (splits(WORKER, Load(1024, 128, **{name: limit}), 3) for limit in limits)
            for split in strict:
                assert split.rate <= rate_of(loose, str(split)) * 1.001


def test_without_a_limit_prefill_workers_are_never_idle() -> None:
    without = Load(4096, 256)
    assert prefill_rate(WORKER, without, 2) == pytest.approx(2 / WORKER.prefill(1, 4096))
    assert prefill_rate(WORKER, Load(4096, 256, ttft=0.09), 2) == 0


def test_a_chunk_between_two_steps_keeps_to_the_limit() -> None:
    (split,) = [split for split in splits(WORKER, LOAD, 4) if split.num_both]
    chunks = -(-LOAD.prompt_len // split.chunk_size)
    chunk_s = WORKER.prefill(1, LOAD.prompt_len, split.chunk_size) / chunks
    assert chunk_s + WORKER.decode_step(split.batch_size, LOAD.kv_len) <= LOAD.itl
    assert split.chunk_size % WORKER.page_size == 0


@pytest.mark.parametrize("prompt_len", [1, 15, 17, 100, 4090])
def test_a_prompt_that_fills_no_last_page_is_computed_whole(prompt_len: int) -> None:
    (whole,) = splits(WORKER, Load(prompt_len, 256), 1)
    (longer,) = splits(WORKER, Load(-(-prompt_len // 16) * 16, 256), 1)
    assert whole.chunk_size == longer.chunk_size >= prompt_len
    assert whole.rate >= longer.rate > 0
    own = Worker(LLAMA_8B, GPUS["h200"], chunk_size=100)
    assert splits(own, Load(prompt_len, 256), 1)[0].chunk_size <= 100


@pytest.mark.parametrize("num_servers", [1, 3])
def test_a_line_is_as_long_as_it_is_simulated_to_be(num_servers: int) -> None:
    service, wait, share = 0.1, 0.3, 0.9
    rate = num_servers * max_utilisation(num_servers, service, wait, share) / service
    rng = random.Random(7)
    now, free, waits = 0.0, [0.0] * num_servers, []
    for _ in range(60_000):
        now += rng.expovariate(rate)
        begin = max(now, min(free))
        free[free.index(min(free))] = begin + service
        waits.append(begin - now)
    in_time = sum(waited <= wait for waited in waits) / len(waits)
    assert in_time == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(
    "numbers", [{"prompt_len": 0}, {"output_len": 0}, {"ttft": 0.0}, {"itl": -1.0}, {"good_share": 1.0}]
)
def test_numbers_that_make_no_load_are_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        Load(**{"prompt_len": 1, "output_len": 1, **numbers})  # type: ignore[arg-type]
