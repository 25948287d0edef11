"""The counters of workers, and what they log of each batch."""

import logging

import pytest

from both_worker.handover import LocalHandover
from both_worker.scheduler import BothScheduler
from decode_worker.config import DecodeConfig
from decode_worker.scheduler import DecodeScheduler
from engine.kvcache.cache_manager import CacheManager
from prefill_worker.config import PrefillConfig
from prefill_worker.scheduler import PrefillScheduler
from tandem.messages import Admit, Prefill, Shipped, WorkerStats
from tandem.sampling_params import SamplingParams
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine
from tests.fakes.workers import ListOutbox, WorkerPair
from worker.events import FromRouter

# Of the fake engine, with 4 tokens of 2 floats each.
PAGE_BYTES = 32


def page_sum(stats: WorkerStats) -> int:
    return stats.num_free_pages + stats.num_cached_pages + stats.num_locked_pages + stats.num_leased_pages


def test_a_prompt_is_computed_or_found_and_counted_once_on_each_side() -> None:
    pair = WorkerPair()
    prompt = list(range(18))
    pair.submit("a", prompt, max_tokens=4)
    pair.run()
    p, d = pair.p.scheduler.stats(), pair.d.scheduler.stats()
    assert (p.prompt_tokens_computed, p.prefix_cached_tokens) == (18, 0)
    assert (d.prompt_tokens_computed, d.prefix_cached_tokens) == (0, 0)
    assert p.shipped == (Shipped("shared_memory", 5, 5 * PAGE_BYTES),)
    assert d.shipped == ()
    # Four of its five pages are full and shared; 10 tokens follow.
    pair.submit("b", prompt[:16] + [100 + i for i in range(10)], max_tokens=4)
    pair.run()
    p, d = pair.p.scheduler.stats(), pair.d.scheduler.stats()
    assert (p.prompt_tokens_computed, p.prefix_cached_tokens) == (18 + 10, 16)
    assert (d.prompt_tokens_computed, d.prefix_cached_tokens) == (0, 16)
    assert p.shipped == (Shipped("shared_memory", 8, 8 * PAGE_BYTES),)
    assert page_sum(p) == p.num_total_pages and page_sum(d) == d.num_total_pages


def test_outputs_of_an_earlier_attempt_are_no_prompt() -> None:
    pair = WorkerPair()
    prompt = list(range(8))
    pair.submit("a", prompt, max_tokens=9)
    pair.run()
    outputs = tuple(pair.output("a")[:8])
    pair.submit("b", prompt, output_ids=outputs, attempt=1, max_tokens=12)
    pair.run()
    # The decode worker has 16 of these tokens, but only 8 of them are the client's prompt.
    assert pair.d.scheduler.stats().prefix_cached_tokens == 8
    assert pair.p.scheduler.stats().prefix_cached_tokens == 8


def test_a_request_that_is_not_started_finds_nothing() -> None:
    pair = WorkerPair(prefill={"config": PrefillConfig(chunk_size=4, min_shared_tokens=4)})
    pair.submit("a", list(range(8)))
    pair.run()
    pair.submit("b", [*range(8), *range(100, 140)])
    pair.submit("c", [*range(8), *range(200, 240)])
    pair.p.scheduler.step()
    stats = pair.p.scheduler.stats()
    assert (stats.num_running, stats.num_queued, stats.prefix_cached_tokens) == (1, 1, 8)


def test_what_is_sent_over_a_second_link_adds_up() -> None:
    pair = WorkerPair()
    pair.submit("a", list(range(8)))
    pair.run()
    pair.cut_link()
    pair.run()
    pair.open_link()
    pair.submit("b", list(range(100, 108)))
    pair.run()
    assert pair.p.scheduler.stats().shipped == (Shipped("shared_memory", 4, 4 * PAGE_BYTES),)


def test_requests_that_are_given_back_are_counted() -> None:
    pair = WorkerPair(num_pages=8)
    for n in range(2):
        pair.submit(f"r{n}", [100 * n + i for i in range(8)], max_tokens=17, arrival_ns=n)
    pair.run()
    assert pair.d.scheduler.stats().num_given_back == 1
    assert pair.p.scheduler.stats().num_given_back == 0


def test_leases_that_expire_are_counted() -> None:
    pair = WorkerPair(config=DecodeConfig(lease_duration_s=10.0), prefill={"config": PrefillConfig(chunk_size=4)})
    pair.submit("a", list(range(12)))
    pair.p.scheduler.step()
    pair.deliver()
    pair.d.scheduler.step()
    assert pair.d.scheduler.stats().num_leases_expired == 0
    pair.clock.advance(10.0)
    for _ in range(3):
        pair.d.scheduler.step()
    assert pair.d.scheduler.stats().num_leases_expired == 1


def test_role_both_counts_a_prompt_at_prefill_alone() -> None:
    clock, outbox, engine, cache = FakeClock(), ListOutbox(), FakeEngine(64, 4), CacheManager(64, 4)
    decode = DecodeScheduler(engine, cache, outbox, DecodeConfig(), clock)
    config = PrefillConfig()
    prefill = PrefillScheduler(engine, cache, LocalHandover(decode), outbox, config, clock)
    both = BothScheduler(engine, cache, prefill, decode)
    prompt, sampling = tuple(range(18)), SamplingParams(max_tokens=4)
    for request_id in ("a", "b"):
        both.receive(FromRouter(Admit(request_id, 0, prompt, (), sampling, 60.0)))
        both.receive(FromRouter(Prefill(request_id, 0, prompt, (), sampling, "both-0")))
        while both.step():
            pass
    stats = both.stats()
    assert (stats.prompt_tokens_computed, stats.prefix_cached_tokens) == (18 + 2, 16)
    assert stats.shipped == ()
    assert page_sum(stats) == stats.num_total_pages


def batch_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if " batch: " in record.getMessage()]


def test_batches_are_logged_at_level_debug(caplog: pytest.LogCaptureFixture) -> None:
    pair = WorkerPair(prefill={"config": PrefillConfig(chunk_size=8, min_shared_tokens=4)})
    pair.submit("a", list(range(9)), max_tokens=3)
    pair.run()
    with caplog.at_level(logging.DEBUG, "prefill_worker"), caplog.at_level(logging.DEBUG, "decode_worker"):
        pair.submit("b", [*range(8), *range(100, 107)], max_tokens=3)
        pair.submit("c", list(range(200, 209)), max_tokens=1)
        pair.submit("d", list(range(300, 304)), max_tokens=1)
        pair.run()
    assert [line for line in batch_lines(caplog) if line.startswith("prefill")] == [
        "prefill batch: 2 new sequences, 8 new tokens, 8 cached tokens, 2 running, 1 queued",
        "prefill batch: 0 new sequences, 8 new tokens, 0 cached tokens, 2 running, 1 queued",
        "prefill batch: 1 new sequences, 4 new tokens, 0 cached tokens, 1 running, 0 queued",
    ]
    assert [line for line in batch_lines(caplog) if line.startswith("decode")] == [
        "decode batch: 1 new sequences, 1 new tokens, 8 cached tokens, 1 running, 0 queued",
        "decode batch: 0 new sequences, 1 new tokens, 0 cached tokens, 1 running, 0 queued",
    ]


def test_no_batch_is_logged_at_level_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pair = WorkerPair()
    pair.submit("a", list(range(9)))
    pair.run()
    assert not batch_lines(caplog)
