import pytest

from tandem.engine.ranks.config import RankConfig


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_each_rank_holds_the_heads_that_its_queries_read(degree: int, num_kv_heads: int) -> None:
    num_q_heads = 24
    for rank in range(degree):
        ranks = RankConfig(rank, degree)
        needed = {head * num_kv_heads // num_q_heads for head in ranks.share(num_q_heads)}
        held = ranks.kv_heads(num_kv_heads)
        assert needed == set(range(held.first, held.end))
    holders = [rank for rank in range(degree) if RankConfig(rank, degree).kv_heads(num_kv_heads).first == 0]
    assert len(holders) == RankConfig(0, degree).kv_head_copies(num_kv_heads)


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [1, 32, 257, 128_256])
def test_each_token_of_a_vocabulary_has_one_rank(degree: int, size: int) -> None:
    held = [RankConfig(rank, degree).vocabulary(size) for rank in range(degree)]
    assert [token for tokens in held for token in tokens] == list(range(size))


def test_ranks_beyond_the_degree_are_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 of 2 does not exist"):
        RankConfig(2, 2)
