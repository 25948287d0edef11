from tandem.messages import TierHits
from tandem.worker.page_tier import NoTier
from tandem.worker.prefetches import Prefetches
from tests.fakes.scripted_tier import ScriptedTier


def test_each_prefetch_is_begun_and_ended_once() -> None:
    tier = ScriptedTier()
    prefetches = Prefetches(tier, "prefill")
    prefetches.begin(("r", 0), [1, 2], "", 0)
    prefetches.begin(("r", 0), [1, 2], "", 0)
    prefetches.begin(("r", 1), [1, 2, 3], "", 0)
    assert tier.begun == [("r", 0, "prefill"), ("r", 1, "prefill")]
    tier.loading.add("r")
    tier.hits["r"] = TierHits(host=2)
    assert prefetches.is_loading(("r", 0)) and not prefetches.is_loading(("s", 0))
    assert prefetches.end(("r", 0)) == TierHits(host=2)
    assert prefetches.end(("r", 0)) == prefetches.end(("s", 0)) == TierHits()
    assert tier.ended == [("r", 0, "prefill")] and not prefetches.is_loading(("r", 0))


def test_nothing_is_kept_without_a_store() -> None:
    prefetches = Prefetches(NoTier(), "prefill")
    prefetches.begin(("r", 0), [1, 2], "", 0)
    assert not prefetches.has_store and not prefetches.is_loading(("r", 0)) and prefetches.end(("r", 0)) == TierHits()
