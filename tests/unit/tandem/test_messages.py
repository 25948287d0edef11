"""The arithmetic of hits by tier."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.messages import TierHits

tokens = st.integers(0, 100)
hits = st.builds(TierHits, tokens, tokens, tokens)


@given(hits, tokens)
def test_hits_are_cut_from_their_end(loaded: TierHits, num_tokens: int) -> None:
    cut = loaded.within(num_tokens)
    assert cut.total == min(loaded.total, num_tokens)
    assert cut.host <= loaded.host and cut.disk <= loaded.disk and cut.peer <= loaded.peer
    if cut.peer:
        assert (cut.host, cut.disk) == (loaded.host, loaded.disk)
    if cut.disk:
        assert cut.host == loaded.host


@given(hits, tokens, tokens)
def test_hits_in_a_prompt_add_up_with_those_of_the_pool(loaded: TierHits, num_pool: int, prompt_len: int) -> None:
    cached_len = num_pool + loaded.total
    own = loaded.in_prompt(cached_len, prompt_len)
    assert own == loaded.within(own.total)
    assert min(num_pool, prompt_len) + own.total == min(cached_len, prompt_len)


@given(hits, tokens)
def test_hits_by_tier_add_up_to_the_cached_tokens(loaded: TierHits, num_pool: int) -> None:
    by_tier = loaded.among(loaded.total + num_pool)
    assert sum(by_tier.values()) == loaded.total + num_pool and by_tier["pool"] == num_pool
    counts = loaded.counts()
    assert sum(counts.values()) == loaded.total and set(counts) in (
        set(),
        {"host_tokens", "disk_tokens", "peer_tokens"},
    )
