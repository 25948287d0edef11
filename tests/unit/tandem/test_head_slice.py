"""Heads of a rank, as Megatron and vLLM share them."""

import pytest

from tandem.head_slice import HeadSlice


def firsts(total: int, degree: int) -> list[int]:
    return [HeadSlice.of(total, rank, degree).first for rank in range(degree)]


def test_few_ranks_split_the_heads_and_many_replicate_them() -> None:
    assert firsts(8, 2) == [0, 4] and HeadSlice.of(8, 1, 2) == HeadSlice(4, 4, 8)
    assert firsts(4, 4) == [0, 1, 2, 3]
    assert firsts(2, 6) == [0, 0, 0, 1, 1, 1] and HeadSlice.of(2, 5, 6) == HeadSlice(1, 1, 2)
    assert str(HeadSlice.of(8, 1, 2)) == "KV heads 4 to 7 of 8"


@pytest.mark.parametrize(("total", "degree"), [(4, 3), (4, 6), (8, 5), (0, 1), (4, 0)])
def test_degrees_that_fit_no_head_are_refused(total: int, degree: int) -> None:
    with pytest.raises(ValueError, match=f"{degree} ranks cannot share {total} KV heads"):
        HeadSlice.of(total, 0, degree)
