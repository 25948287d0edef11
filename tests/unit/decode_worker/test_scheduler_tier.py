"""Growth of running requests while copies to the page store hold pages."""

from typing import Any

import pytest

from tandem.decode_worker.config import DecodeConfig
from tandem.decode_worker.scheduler import POLL_S
from tandem.engine.kvcache.cache_manager import PageHandle
from tandem.messages import Finished, GaveBack, TierHits
from tandem.prefill_worker.config import PrefillConfig
from tests.fakes.engine import expected_tokens
from tests.fakes.scripted_tier import ScriptedTier
from tests.fakes.workers import WorkerPair


def make_pair(num_pages: int, **decode: Any) -> tuple[WorkerPair, ScriptedTier]:
    tier = ScriptedTier()
    config = PrefillConfig(min_shared_tokens=4)
    prefill = {"config": config, "num_pages": 512}
    return WorkerPair(prefill=prefill, num_pages=num_pages, tier=tier, **decode), tier


def hold_pages(pair: WorkerPair) -> PageHandle:
    """Hold all available pages, like copies of the page store."""
    cache = pair.d.cache
    handle = cache.acquire_pages([], cache.num_available_pages * cache.page_size, max_cached_len=0)
    assert handle is not None
    return handle


@pytest.mark.parametrize("asynchronous", [False, True])
def test_growth_waits_for_copies_and_gives_nobody_back(asynchronous: bool) -> None:
    pair, tier = make_pair(12, asynchronous=asynchronous)
    pair.submit("old", list(range(8)), max_tokens=12)
    pair.submit("young", list(range(50, 58)), max_tokens=12)
    while pair.d.scheduler.num_running < 2:
        assert pair.turn()
    held = hold_pages(pair)
    tier.num_yields = 10**6
    for _ in range(40):
        pair.turn()
    assert tier.num_asked and not pair.d.outbox.of(GaveBack) and not pair.d.outbox.of(Finished)
    assert pair.d.scheduler.num_running == 2
    assert pair.d.scheduler.next_deadline() == pair.clock() + POLL_S
    pair.d.cache.release_pages(held)
    pair.run()
    assert not pair.d.outbox.of(GaveBack)
    for name, prompt in (("old", list(range(8))), ("young", list(range(50, 58)))):
        assert pair.output(name) == expected_tokens(prompt, 12)
    pair.check_idle()


def test_jobs_with_pages_go_on_while_one_waits() -> None:
    pair, tier = make_pair(12)
    pair.submit("waits", list(range(11)), max_tokens=8)
    pair.submit("has", list(range(50, 56)), max_tokens=8)
    while pair.d.scheduler.num_running < 2:
        assert pair.turn()
    held = hold_pages(pair)
    tier.num_yields = 10**6
    pair.d.engine.batches.clear()
    for _ in range(20):
        pair.turn()
    # The lease of `waits` had a page for one token more, that of `has` for two.
    assert pair.output("waits") == expected_tokens(list(range(11)), 2)
    assert pair.output("has") == expected_tokens(list(range(50, 56)), 3)
    assert len(pair.d.engine.batches[-1][1]) == 1
    pair.d.cache.release_pages(held)
    pair.run()
    assert pair.output("waits") == expected_tokens(list(range(11)), 8)
    pair.check_idle()


def test_without_more_copies_the_cheapest_is_given_back() -> None:
    pair, tier = make_pair(8)
    pair.submit("old", list(range(8)), max_tokens=20)
    pair.submit("young", list(range(50, 58)), max_tokens=20)
    tier.num_yields = 5
    while tier.num_asked < 6:
        assert not pair.d.outbox.of(GaveBack)
        pair.turn()
    pair.run()
    assert [m.request_id for m in pair.d.outbox.of(GaveBack)] == ["young"]
    assert pair.output("old") == expected_tokens(list(range(8)), 20)
    assert not tier.open


def test_hits_are_counted_at_the_grant() -> None:
    pair, tier = make_pair(32, config=DecodeConfig())
    pair.submit("r", list(range(10)))
    tier.load(("r", 0, "decode"), 8, pair.d.cache, pair.d.engine)
    tier.hits["r"] = TierHits(host=4, peer=4)
    pair.run()
    (finished,) = pair.d.outbox.of(Finished)
    assert (finished.cached_len, finished.prefill_loaded) == (8, TierHits())
    stats = pair.d.scheduler.stats()
    counted = stats.prefix_host_tokens, stats.prefix_disk_tokens, stats.prefix_peer_tokens
    assert (stats.prefix_cached_tokens, counted) == (8, (4, 0, 4))
    assert pair.output("r") == expected_tokens(list(range(10)), 5)
