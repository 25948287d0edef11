from tandem.messages import TierHits
from tandem.worker.prefix_hits import PrefixHits


def test_hits_are_counted_within_the_prompt_and_the_cached_prefix() -> None:
    hits = PrefixHits()
    assert hits.add(48, 100, TierHits(host=16, disk=16)) == TierHits(host=16, disk=16)
    # The end was evicted before the request's turn.
    assert hits.add(32, 100, TierHits(host=16, disk=32, peer=16)) == TierHits(host=16, disk=16)
    # The prefix reaches into the output of earlier attempts.
    assert hits.add(64, 40, TierHits(host=32)) == TierHits(host=32)
    assert (hits.num_cached, hits.loaded) == (48 + 32 + 40, TierHits(host=16 + 16 + 8, disk=16 + 16))
