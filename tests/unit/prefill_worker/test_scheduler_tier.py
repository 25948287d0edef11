"""A prefill worker's use of the page store's tier, over a fake engine."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from tandem.engine.grammars import CompiledGrammar, Constraint
from tandem.messages import Embedded, Finished, FirstToken, Prefill, TierHits, Unservable
from tandem.prefill_worker.config import PrefillConfig
from tandem.prefill_worker.queued_request import QueuedRequest
from tandem.prefill_worker.scheduler import LOADING_POLL_S
from tandem.prefill_worker.waiting import MAX_OVERTAKEN, POLICY_WINDOW
from tandem.sampling_params import SamplingParams
from tandem.worker.events import RouterLost
from tandem.worker.page_tier import NoTier
from tests.fakes.engine import expected_tokens
from tests.fakes.scripted_tier import ScriptedTier
from tests.fakes.workers import WorkerPair


def make_pair(num_pages: int = 256, chunk_size: int = 512, **prefill: Any) -> tuple[WorkerPair, ScriptedTier]:
    tier = ScriptedTier()
    config = PrefillConfig(chunk_size=chunk_size, min_shared_tokens=4, **prefill)
    return WorkerPair(prefill={"config": config, "num_pages": num_pages, "tier": tier}, num_pages=256), tier


def first_tokens(pair: WorkerPair) -> list[str]:
    return [m.request_id for m in pair.p.outbox.of(FirstToken)]


def test_a_loading_request_is_passed_by_and_then_goes_first() -> None:
    pair, tier = make_pair(chunk_size=4)
    tier.loading.add("old")
    prompt = list(range(10, 22))
    for name, prompt_ids in (("old", prompt), ("a", [1, 2, 3, 4]), ("b", [5, 6, 7, 8])):
        pair.submit(name, prompt_ids)
    pair.turn()
    assert pair.p.engine.batches == [("prefill", [4])]
    tier.loading.clear()
    tier.load(("old", 0, "prefill"), 8, pair.p.cache, pair.p.engine)
    tier.hits["old"] = TierHits(host=8)
    pair.run()
    assert first_tokens(pair) == ["a", "old", "b"]
    assert pair.p.engine.counters.prompt_tokens_computed == 4 + 4 + 4
    assert pair.output("old") == expected_tokens(prompt, 5)
    assert not tier.open
    pair.check_idle()


def test_queued_tokens_are_those_waiting_and_the_rest_of_started_prompts() -> None:
    pair, tier = make_pair(chunk_size=4)
    tier.loading.add("waits")
    pair.submit("waits", [1, 2, 3])
    pair.submit("started", list(range(10, 20)))
    pair.submit("dropped", [4, 5])
    assert pair.p.scheduler.stats().num_queued_tokens == 15
    pair.abort("dropped")
    pair.turn()
    assert pair.p.scheduler.stats().num_queued_tokens == 3 + 6
    tier.loading.clear()
    pair.run()
    assert pair.p.scheduler.stats().num_queued_tokens == 0


def test_a_worker_polls_for_a_load_that_nothing_else_announces() -> None:
    pair, tier = make_pair()
    tier.loading.add("r")
    pair.submit("r", [1, 2, 3, 4])
    assert not pair.p.scheduler.step()
    assert pair.p.scheduler.next_deadline() == pair.clock() + LOADING_POLL_S
    pair.abort("r")
    pair.run()
    assert pair.p.scheduler.next_deadline() is None
    pair.submit("s", [1, 2, 3, 4])
    pair.run()
    assert first_tokens(pair) == ["s"] and pair.p.scheduler.next_deadline() is None


def test_pages_that_a_job_computes_are_not_loaded() -> None:
    pair, tier = make_pair(chunk_size=4)
    prefix = list(range(10, 22))
    pair.submit("first", prefix)
    pair.turn()
    pair.submit("second", [*prefix, 50, 51, 52, 53])
    pair.turn()
    assert [key[0] for key in tier.begun] == ["first"]
    tier.loading.add("second")
    while first_tokens(pair) != ["first"]:
        assert pair.turn()
    # Only the rest may be in the store.
    pair.p.scheduler.step()
    assert [key[0] for key in tier.begun] == ["first", "second"]
    tier.loading.clear()
    pair.run()
    assert pair.p.engine.counters.prompt_tokens_computed == 12 + 4
    assert not tier.open
    pair.check_idle()


@pytest.mark.parametrize("attempt", [0, 1])
def test_loading_requests_do_not_starve(attempt: int) -> None:
    pair, tier = make_pair(chunk_size=4)
    tier.loading.add("loading")
    pair.submit("loading", [1, 2, 3, 4], attempt=attempt)
    for i in range(MAX_OVERTAKEN + 20):
        pair.submit(f"r{i}", [1000 + i, 2, 3, 4])
    pair.run()
    # An attempt after the first has been overtaken as often as may be.
    assert first_tokens(pair).index("loading") == (1 if attempt else MAX_OVERTAKEN + 1)


def test_prefetches_of_a_long_queue_do_not_evict_each_other() -> None:
    pair, tier = make_pair(num_pages=16, chunk_size=4)
    for i in range(10):
        pair.submit(f"r{i}", list(range(100 * i, 100 * i + 12)), arrival_ns=1 + i)
    assert [key[0] for key in tier.begun] == ["r0", "r1", "r2"]
    pair.submit("oldest", list(range(2000, 2012)))
    assert [key[0] for key in tier.begun][3:] == ["oldest"]
    while len(first_tokens(pair)) < 3:
        assert pair.turn()
    # Two more are computed or next.
    assert not {"r7", "r8", "r9"} & {key[0] for key in tier.begun}
    pair.run()
    assert len(tier.begun) == 11 and not tier.open


def test_a_request_that_a_policy_prefers_is_prefetched_before_it_starts() -> None:
    pair, tier = make_pair(num_pages=16, schedule="lof")
    tier.loading.add("r5")
    for i in range(6):
        pair.submit(f"r{i}", list(range(100 * i, 100 * i + 12)), arrival_ns=1 + i, max_tokens=2 + i)
    assert ("r5", 0, "prefill") not in tier.open
    pair.p.scheduler.step()
    assert ("r5", 0, "prefill") in tier.open and pair.p.scheduler.stats().num_queued > 0
    tier.loading.clear()
    pair.run()
    assert len(first_tokens(pair)) == 6 and not tier.open


def test_a_prompt_that_is_scored_is_computed_without_a_prefetch() -> None:
    pair, tier = make_pair()
    pair.submit("r", [1, 2, 3, 4, 5, 6, 7, 8], num_prompt_logprobs=1)
    pair.run()
    assert tier.begun == [] and first_tokens(pair) == ["r"]


@pytest.mark.parametrize(
    ("hits", "loaded"),
    [
        (TierHits(), TierHits()),
        (TierHits(host=4), TierHits(host=4)),
        (TierHits(host=4, disk=4), TierHits(host=4, disk=4)),
        # The tier has loaded more than is found: the end was evicted.
        (TierHits(host=4, disk=8, peer=4), TierHits(host=4, disk=8)),
        (TierHits(host=20), TierHits(host=12)),
    ],
)
def test_hits_add_up_to_the_cached_prefix(hits: TierHits, loaded: TierHits) -> None:
    pair, tier = make_pair()
    prompt = list(range(18))
    tier.loading.add("r")
    pair.submit("r", prompt)
    tier.load(("r", 0, "prefill"), 12, pair.p.cache, pair.p.engine)
    tier.hits["r"] = hits
    tier.loading.clear()
    pair.run()
    (first,) = pair.p.outbox.of(FirstToken)
    assert (first.cached_len, first.loaded) == (12, loaded)
    (finished,) = pair.d.outbox.of(Finished)
    assert (finished.prefill_cached_len, finished.prefill_loaded) == (12, loaded)
    stats = pair.p.scheduler.stats()
    counted = TierHits(stats.prefix_host_tokens, stats.prefix_disk_tokens, stats.prefix_peer_tokens)
    assert (stats.prefix_cached_tokens, counted) == (12, loaded)


def test_counters_count_the_prompt_without_earlier_output() -> None:
    pair, tier = make_pair()
    pair.submit("r", list(range(6)), output_ids=tuple(range(6, 18)), attempt=1, max_tokens=20)
    tier.load(("r", 1, "prefill"), 4, pair.p.cache, pair.p.engine)
    tier.load(("r", 1, "prefill"), 16, pair.p.cache, pair.p.engine)
    tier.hits["r"] = TierHits(host=8, disk=4)
    pair.run()
    (first,) = pair.p.outbox.of(FirstToken)
    assert (first.cached_len, first.loaded) == (16, TierHits(host=8, disk=4))
    stats = pair.p.scheduler.stats()
    # 4 of the pool, 2 of the 8 behind.
    assert (stats.prefix_cached_tokens, stats.prefix_host_tokens, stats.prefix_disk_tokens) == (6, 2, 0)


def test_hits_of_an_embedding() -> None:
    pair, tier = make_pair()
    tier.loading.add("r")
    pair.embed("r", list(range(10)))
    tier.load(("r", 0, "prefill"), 8, pair.p.cache, pair.p.engine)
    tier.hits["r"] = TierHits(disk=4)
    tier.loading.clear()
    pair.run()
    (embedded,) = pair.p.outbox.of(Embedded)
    assert (embedded.cached_len, embedded.loaded) == (8, TierHits(disk=4))
    assert not tier.open


def test_a_prompt_is_prefetched_while_its_grammar_compiles() -> None:
    pair, tier = make_pair()
    compiled = CompiledGrammar("{}", Future())
    pair.p.engine.constraint = lambda grammar, output_ids=(), client="": Constraint(compiled)  # type: ignore[method-assign]
    pair.submit("r", list(range(8)))
    pair.p.scheduler.step()
    assert list(tier.open) == [("r", 0, "prefill")]
    compiled.matcher.set_exception(ValueError("too large"))
    pair.p.scheduler.step()
    assert pair.p.outbox.of(Unservable) and not tier.open


def abort(pair: WorkerPair) -> None:
    pair.abort("router-0")


def lose_router(pair: WorkerPair) -> None:
    pair.p.scheduler.receive(RouterLost("router"))


def lose_link(pair: WorkerPair) -> None:
    # Without a link the request is refused at its turn.
    pair.cut_link()


@pytest.mark.parametrize("end", [abort, lose_router, lose_link])
@pytest.mark.parametrize("is_loading", [True, False])
def test_every_end_of_a_waiting_request_ends_its_prefetch(end: Callable[[WorkerPair], None], is_loading: bool) -> None:
    pair, tier = make_pair()
    if is_loading:
        tier.loading.add("router-0")
    pair.submit("router-0", list(range(8)))
    if is_loading:
        pair.p.scheduler.step()
    end(pair)
    pair.p.scheduler.step()
    assert tier.ended == tier.begun == [("router-0", 0, "prefill")]
    assert pair.p.scheduler.stats().num_queued == 0


def test_a_request_behind_the_front_of_the_queue_asks_for_nothing() -> None:
    pair, tier = make_pair(num_pages=2048)
    for i in range(POLICY_WINDOW + 10):
        pair.submit(f"r{i}", [3 * i, 2, 3], arrival_ns=1 + i)
    assert [key[0] for key in tier.begun] == [f"r{i}" for i in range(POLICY_WINDOW)]
    pair.submit("oldest", [1, 2, 3], arrival_ns=0)
    assert tier.begun[-1][0] == "oldest"
    pair.run()
    assert len(tier.begun) == POLICY_WINDOW + 11 and not tier.open


def test_a_queue_without_a_store_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = WorkerPair(prefill={"tier": NoTier()})
    monkeypatch.setattr(QueuedRequest, "computes_all", property(lambda _: pytest.fail("a request is looked at")))
    waiting = pair.p.scheduler._waiting
    waiting.enqueue(Prefill("r", 0, (1, 2, 3), (), SamplingParams(4), "d", 1))
    assert not waiting.must_wait_for_load(waiting.start_order()[0])
