"""Hit rates split prompts into cached, loaded and computed tokens."""

import random
from dataclasses import replace

import pytest

from tandem.deploy.estimate.gpus import GPUS, HOST_LINK_SHARE
from tandem.deploy.estimate.rates import Load, prefill_rate, prefill_s, prompt_of_load, splits
from tandem.deploy.estimate.reuse import Prompt, prompt_of
from tandem.deploy.estimate.worker import Worker
from tests.fakes.model_shapes import LLAMA_8B

H200 = GPUS["h200"]
WORKER = Worker(LLAMA_8B, H200)
# 8 GB/s, so that loading 90 % of a prompt takes longer than computing 10 %.
SLOW_LINK = Worker(LLAMA_8B, replace(H200, host_link=8e9 / HOST_LINK_SHARE))


def test_hits_are_first_in_the_prompt_and_its_last_token_is_computed() -> None:
    prompt = prompt_of(WORKER, 1000, 0.25, 0.5)
    assert (prompt.num_cached, prompt.num_loaded, prompt.num_computed) == (250, 500, 250)
    assert prompt.loading_s == pytest.approx(500 * 131_072 / (64e9 * HOST_LINK_SHARE))
    assert prompt_of(WORKER, 1000, 1.0, 0.0) == Prompt(999, 0, 1, 0.0)
    assert prompt_of(WORKER, 1000, 0.0, 1.0).num_computed == 1
    assert prompt_of(WORKER, 1, 0.5, 0.5) == Prompt(0, 0, 1, 0.0)


def test_workers_compute_what_they_would_load_more_slowly() -> None:
    crawling = Worker(LLAMA_8B, replace(H200, host_link=1e9))
    assert prompt_of(crawling, 4096, 0.1, 0.8) == Prompt(410, 0, 3686, 0.0)
    assert prompt_of(WORKER, 4096, 0.1, 0.8).num_loaded == 3277


def test_unknown_links_are_refused_only_for_hits_in_the_store() -> None:
    unknown = Worker(LLAMA_8B, replace(H200, host_link=0.0))
    assert prompt_of(unknown, 100, 0.5, 0.0).num_cached == 50
    with pytest.raises(ValueError, match="give --host-link"):
        prompt_of(unknown, 100, 0.0, 0.5)


def test_more_hits_serve_more_requests() -> None:
    def rates(hit_rate: float, store_hit_rate: float) -> list[float]:
        load = Load(8192, 64, 0.5, 0.025, hit_rate=hit_rate, store_hit_rate=store_hit_rate)
        return [split.rate for split in sorted(splits(WORKER, load, 2), key=str)]

    none, stored, cached = rates(0.0, 0.0), rates(0.0, 0.8), rates(0.8, 0.0)
    for without, loaded, held in zip(none, stored, cached, strict=True):
        assert 1.5 * without < loaded <= held


def test_a_slow_link_limits_the_rate() -> None:
    load = Load(4096, 1, store_hit_rate=0.9)
    prompt = prompt_of_load(SLOW_LINK, load)
    assert prompt.loading_s > prefill_s(SLOW_LINK, prompt)
    assert prefill_rate(SLOW_LINK, load, 2) == pytest.approx(2 / prompt.loading_s)


@pytest.mark.parametrize("worker", [WORKER, SLOW_LINK])
def test_rates_are_those_of_a_simulated_worker(worker: Worker) -> None:
    load = Load(4096, 1, ttft=0.5, store_hit_rate=0.9)
    prompt, rate = prompt_of_load(worker, load), prefill_rate(worker, load, 1)
    service = prefill_s(worker, prompt)

    def good_share(rate: float) -> float:
        rng = random.Random(7)
        arrival, link_free, worker_free, num_good = 0.0, 0.0, 0.0, 0
        for _ in range(40_000):
            arrival += rng.expovariate(rate)
            link_free = max(arrival, link_free) + prompt.loading_s
            # The worker takes prompts in order.
            worker_free = max(link_free, worker_free) + service
            num_good += worker_free - arrival <= load.ttft
        return num_good / 40_000

    assert good_share(0.96 * rate) > load.good_share > good_share(1.04 * rate)


@pytest.mark.parametrize("rates", [(-0.1, 0.0), (0.6, 0.6), (0.0, 1.1)])
def test_impossible_hit_rates_are_refused(rates: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="together at most 1"):
        Load(10, 10, hit_rate=rates[0], store_hit_rate=rates[1])
