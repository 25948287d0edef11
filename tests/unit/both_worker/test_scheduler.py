"""What one worker of both kinds counts."""

from dataclasses import fields, replace

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
from tests.fakes.workers import ListOutbox
from worker.events import FromRouter


def make_schedulers() -> tuple[BothScheduler, PrefillScheduler, DecodeScheduler]:
    clock, outbox, engine, cache = FakeClock(), ListOutbox(), FakeEngine(64, 4), CacheManager(64, 4)
    decode = DecodeScheduler(engine, cache, outbox, DecodeConfig(), clock)
    prefill = PrefillScheduler(engine, cache, LocalHandover(decode), outbox, PrefillConfig(), clock)
    return BothScheduler(engine, cache, prefill, decode), prefill, decode


def test_a_prompt_is_counted_at_prefill_alone() -> None:
    both, _, _ = make_schedulers()
    prompt, sampling = tuple(range(18)), SamplingParams(max_tokens=4)
    for request_id in ("a", "b"):
        both.receive(FromRouter(Admit(request_id, 0, prompt, (), sampling, 60.0)))
        both.receive(FromRouter(Prefill(request_id, 0, prompt, (), sampling, "both-0")))
        while both.step():
            pass
    stats = both.stats()
    assert (stats.prompt_tokens_computed, stats.prefix_cached_tokens) == (18 + 2, 16)
    assert stats.shipped == ()
    num_pages = (stats.num_free_pages, stats.num_cached_pages, stats.num_locked_pages, stats.num_leased_pages)
    assert sum(num_pages) == stats.num_total_pages


def test_every_counter_of_both_schedulers_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    both, prefill, decode = make_schedulers()
    numbers = [f.name for f in fields(WorkerStats) if f.name != "shipped"]
    before = both.stats()
    # Each counter of each scheduler has a number of its own.
    of_prefill = WorkerStats(**{name: 2**i for i, name in enumerate(numbers)}, shipped=(Shipped("a", 1, 2),))
    of_decode = WorkerStats(**{name: 3**i for i, name in enumerate(numbers)}, shipped=(Shipped("b", 3, 4),))
    monkeypatch.setattr(prefill, "own_stats", lambda: of_prefill)
    monkeypatch.setattr(decode, "own_stats", lambda: of_decode)
    expected = {name: getattr(before, name) + 2**i + 3**i for i, name in enumerate(numbers)}
    assert both.stats() == replace(before, **expected, shipped=(Shipped("a", 1, 2), Shipped("b", 3, 4)))
