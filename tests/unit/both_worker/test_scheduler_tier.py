"""The page store's tier under both schedulers of one pool."""

from tandem.messages import Finished, FirstToken, GaveBack, TierHits
from tests.fakes.both_workers import BothWorkers
from tests.fakes.engine import expected_tokens
from tests.fakes.scripted_tier import ScriptedTier


def make_workers(num_pages: int = 64) -> tuple[BothWorkers, dict[str, ScriptedTier]]:
    tiers = {"a": ScriptedTier(), "b": ScriptedTier()}
    return BothWorkers(num_pages, tiers=tiers), tiers


def test_a_prompt_is_prefetched_where_its_pages_are_needed() -> None:
    workers, tiers = make_workers()
    prompt = list(range(18))
    workers.submit("here", prompt, "a", "a")
    workers.submit("there", [7, *prompt], "a", "b")
    assert list(tiers["a"].open) == [("here", 0, "prefill"), ("there", 0, "prefill")]
    assert list(tiers["b"].open) == [("there", 0, "decode")]
    workers.run()
    assert not tiers["a"].open and not tiers["b"].open
    assert workers.output("a", "here") == expected_tokens(prompt, 3)
    assert workers.output("b", "there") == expected_tokens([7, *prompt], 3)


def test_hits_of_a_prompt_decoded_here_reach_its_end() -> None:
    workers, tiers = make_workers()
    worker, prompt = workers.workers["a"], list(range(18))
    workers.submit("r", prompt, "a", "a")
    tiers["a"].load(("r", 0, "prefill"), 16, worker.cache, worker.engine)
    tiers["a"].hits["r"] = TierHits(host=8, disk=4)
    workers.run()
    (first,), (finished,) = workers.of("a", FirstToken), workers.of("a", Finished)
    assert (first.cached_len, first.loaded) == (16, TierHits(host=8, disk=4))
    assert (finished.prefill_cached_len, finished.prefill_loaded) == (16, TierHits(host=8, disk=4))
    stats = worker.scheduler.stats()
    assert (stats.prefix_cached_tokens, stats.prefix_host_tokens, stats.prefix_disk_tokens) == (16, 8, 4)
    assert workers.output("a", "r") == expected_tokens(prompt, 3)


def test_growth_waits_for_copies_while_prompts_go_on() -> None:
    workers, tiers = make_workers(num_pages=16)
    worker = workers.workers["a"]
    workers.submit("r", list(range(8)), "a", "a", max_tokens=16)
    while not worker.scheduler.stats().num_running or not workers.output("a", "r"):
        assert workers.turn()
    num_held = worker.cache.num_available_pages
    held = worker.cache.acquire_pages([], num_held * 4, max_cached_len=0)
    assert held is not None
    tiers["a"].num_yields = 10**6
    for _ in range(20):
        workers.turn()
    assert tiers["a"].num_asked and len(workers.output("a", "r")) < 16
    workers.submit("later", list(range(50, 54)), "a", "a")
    worker.cache.release_pages(held)
    workers.run()
    assert not workers.of("a", GaveBack)
    assert workers.output("a", "r") == expected_tokens(list(range(8)), 16)
    assert workers.output("a", "later") == expected_tokens(list(range(50, 54)), 3)
