"""Splits of GPUs, against general laws and measurements on four H200s."""

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest

from tandem.deploy.estimate import both, worker
from tandem.deploy.estimate.gpus import GPUS
from tandem.deploy.estimate.rates import (
    Load,
    Split,
    decode_rate,
    largest_batch,
    prefill_rate,
    splits,
    splits_for,
    steps_for_one,
)
from tandem.deploy.estimate.worker import Worker
from tests.fakes.model_shapes import LLAMA_8B

WORKER = Worker(LLAMA_8B, GPUS["h200"])
LOAD = Load(4096, 256, ttft=0.5, itl=0.025)


def rate_of(found: list[Split], name: str) -> float:
    (rate,) = [split.rate for split in found if str(split) == name]
    return rate


# Requests/s of four H200s with 90 % good (docs/estimate.md), by split and ITL limit.
MEASURED = {("2:2", 0.015): 15.5, ("3:1", 0.015): 14.7, ("2:2", 0.025): 15.5, ("3:1", 0.025): 22.0}
# Goodput of four workers in a simulated cluster: tokens, ITL limit, and 3:1, 2:2, 1:3, 4 both.
MODELLED = {
    (4096, 256, 0.015): (17.4, 17.5, 7.5, 17.1),
    (4096, 256, 0.025): (21.8, 17.5, 7.5, 21.7),
    (4096, 256, 0.050): (23.5, 17.5, 7.5, 25.2),
    (1024, 512, 0.015): (27.6, 55.2, 40.9, 56.8),
    (1024, 512, 0.025): (30.0, 59.7, 40.9, 67.6),
    (1024, 512, 0.050): (30.0, 59.7, 40.9, 70.1),
    (512, 1024, 0.015): (16.9, 34.3, 51.7, 54.2),
    (512, 1024, 0.025): (16.9, 34.3, 51.7, 57.9),
    (512, 1024, 0.050): (16.9, 34.3, 51.7, 57.5),
}
# These depend on unmeasured mixed steps of more than 128 sequences.
UNMEASURED = (512, 1024, 0.015)


@pytest.fixture
def older_engine(monkeypatch: pytest.MonkeyPatch) -> Worker:
    """The measured configuration: steps of 1, 32, 128 and 256 sequences of 1,152 tokens took 4.07, 5.96, 10.9 and
    17.9 ms; a layer's attention to 64 of 4,096 tokens took 272.6 us, of at least 256.9; no mixed steps."""
    older = worker.BFLOAT16._replace(decode_share=0.8, own_layer_s=13.5e-6, layer_s=30e-6)
    monkeypatch.setattr(worker, "BFLOAT16", older)
    monkeypatch.setattr(worker, "KV_READ_SHARE", 256.9 / 272.6)
    return Worker(LLAMA_8B, GPUS["h200"], mixed_steps=False)


@pytest.mark.parametrize(("name", "itl"), MEASURED)
def test_four_gpus_give_about_what_was_measured(name: str, itl: float, older_engine: Worker) -> None:
    found = splits(older_engine, Load(4096, 256, ttft=0.5, itl=itl), 4)
    assert rate_of(found, name) == pytest.approx(MEASURED[name, itl], rel=0.15)


def test_whole_prompts_between_steps_give_about_what_was_measured(older_engine: Worker) -> None:
    # The limit was 25 ms on the mean of a request's gaps.
    found = splits(older_engine, Load(4096, 256, ttft=0.5), 4)
    assert rate_of(found, "4 both") == pytest.approx(27, rel=0.15)


def test_chunks_of_one_size_between_steps_give_about_what_was_measured(
    older_engine: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(both, "MIN_TOKENS", 512)
    found = splits(replace(older_engine, chunk_size=512), LOAD, 4)
    assert rate_of(found, "4 both") == pytest.approx(17, rel=0.15)


@pytest.fixture
def older_mixed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the simulation, whose kernels took 21 us more for a layer."""
    newer = Worker.mixed_step
    more = LLAMA_8B.num_layers * 21e-6
    monkeypatch.setattr(Worker, "mixed_step", lambda self, *sizes: newer(self, *sizes) + more)


@pytest.mark.usefixtures("older_mixed_steps")
@pytest.mark.parametrize(("prompt_len", "output_len", "itl"), MODELLED)
def test_four_gpus_give_about_what_a_cluster_in_virtual_time_does(prompt_len: int, output_len: int, itl: float) -> None:
    found = splits(WORKER, Load(prompt_len, output_len, ttft=0.5, itl=itl), 4)
    modelled = MODELLED[prompt_len, output_len, itl]
    for name, rate in zip(("3:1", "2:2", "1:3", "4 both"), modelled, strict=True):
        is_measured = (prompt_len, output_len, itl) != UNMEASURED or name != "4 both"
        assert rate_of(found, name) == pytest.approx(rate, rel=0.13 if is_measured else 0.2)


def test_mixed_steps_serve_more() -> None:
    apart = replace(WORKER, mixed_steps=False)
    for itl in (0.015, 0.025):
        limits = Load(4096, 256, ttft=0.5, itl=itl)
        assert splits(apart, limits, 1)[0].rate < 0.9 * splits(WORKER, limits, 1)[0].rate


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


@pytest.mark.parametrize("max_batch_size", [1, 8])
def test_without_a_limit_few_places_are_no_fault(max_batch_size: int) -> None:
    small = replace(WORKER, max_batch_size=max_batch_size)
    load = Load(4096, 256)
    decoded = max_batch_size / (255 * small.decode_step(max_batch_size, load.kv_len))
    assert rate_of(splits(small, load, 2), "1:1") == pytest.approx(min(decoded, prefill_rate(small, load, 1)), rel=0.02)
    # With a limit, an arrival without a place waits, and one in ten may.
    assert 0 < decode_rate(small, replace(load, itl=0.05)) < decoded


def test_stricter_limits_give_no_higher_rate() -> None:
    for name in ("ttft", "itl"):
        limits = (0.1, 0.05, 0.025, 0.015, 0.01)
        for loose, strict in pairwise(splits(WORKER, Load(1024, 128, **{name: limit}), 3) for limit in limits):
            for split in strict:
                assert split.rate <= rate_of(loose, str(split)) * 1.001


def test_without_a_limit_prefill_workers_are_never_idle() -> None:
    without = Load(4096, 256)
    assert prefill_rate(WORKER, without, 2) == pytest.approx(2 / WORKER.prefill(1, 4096))
    assert prefill_rate(WORKER, Load(4096, 256, ttft=0.09), 2) == 0


@pytest.mark.parametrize("prompt_len", [1, 15, 17, 100, 4090])
def test_a_prompt_that_fills_no_last_page_is_computed_whole(prompt_len: int) -> None:
    (whole,) = splits(WORKER, Load(prompt_len, 256), 1)
    (longer,) = splits(WORKER, Load(-(-prompt_len // 16) * 16, 256), 1)
    assert whole.chunk_size == prompt_len and longer.chunk_size == -(-prompt_len // 16) * 16
    assert whole.rate >= longer.rate > 0
    own = Worker(LLAMA_8B, GPUS["h200"], chunk_size=100)
    assert splits(own, Load(prompt_len, 256), 1)[0].chunk_size <= 100


@pytest.mark.parametrize(
    "numbers", [{"prompt_len": 0}, {"output_len": 0}, {"ttft": 0.0}, {"itl": -1.0}, {"good_share": 1.0}]
)
def test_numbers_that_make_no_load_are_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        Load(**{"prompt_len": 1, "output_len": 1, **numbers})  # type: ignore[arg-type]


def test_batches_without_room_for_drafts_need_more_steps() -> None:
    load, drafting = replace(LOAD, num_accepted=0.8), replace(WORKER, num_drafts=1)
    assert steps_for_one(WORKER, LOAD, 256) == steps_for_one(drafting, load, 128) == 1
    # Half of 170 requests have a draft, and none of 256 has.
    assert steps_for_one(drafting, load, 170) == pytest.approx(1.8 / (1 + 0.8 * 86 / 170))
    assert steps_for_one(drafting, load, 256) == pytest.approx(1.8)
    # A full batch drafts nothing, and serves the most.
    large, short = replace(WORKER, max_batch_size=512), Load(64, 512)
    plain = decode_rate(large, short)
    assert decode_rate(replace(large, num_drafts=1), replace(short, num_accepted=0.8)) == plain


def test_accepted_drafts_let_a_decode_worker_serve_more() -> None:
    plain = decode_rate(WORKER, LOAD)
    drafting = replace(WORKER, num_drafts=1)
    assert plain < decode_rate(drafting, replace(LOAD, num_accepted=0.8)) < 1.8 * plain
    # Wrong drafts cost their rows.
    assert decode_rate(drafting, LOAD) < plain
    assert rate_of(splits(drafting, replace(LOAD, num_accepted=0.8), 4), "3:1") > rate_of(
        splits(WORKER, LOAD, 4), "3:1"
    )
    with pytest.raises(ValueError, match="accepted drafts must be fewer than the output's tokens, not 256"):
        replace(LOAD, num_accepted=256)
