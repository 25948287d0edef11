"""What the decode kernel is told: every token of every sequence once, within the memory that was made for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.decode_plan import HEAD_SIZE, ITEM_SIZE, TILE, DecodePlan
from engine.attention.layout import KvHeadLayout
from engine.token_sequence import TokenSequence

DUMMY_PAGE = 9_999


def plan_of(num_kv_heads: int, page_size: int = 16, num_sms: int = 132) -> DecodePlan:
    return DecodePlan(KvHeadLayout(2, page_size, num_kv_heads, 64, "bfloat16"), num_sms, DUMMY_PAGE)


def sequence_of(num_tokens: int, page_size: int, first_page: int) -> TokenSequence:
    num_pages = -(-num_tokens // page_size) + 1
    sequence = TokenSequence([0] * num_tokens, 1, range(first_page, first_page + num_pages), cached_len=num_tokens - 1)
    sequence.extend(1)
    return sequence


@given(
    num_kv_heads=st.sampled_from([1, 2, 3, 8, 32]),
    page_size=st.sampled_from([1, 3, 16, 64]),
    lengths=st.lists(st.one_of(st.integers(1, 70), st.integers(1, 5_000)), min_size=0, max_size=70),
    num_padding=st.integers(0, 5),
)
def test_items_cover_every_token_once(num_kv_heads: int, page_size: int, lengths: list[int], num_padding: int) -> None:
    plans = plan_of(num_kv_heads, page_size)
    num_rows = len(lengths) + num_padding
    if num_rows == 0:
        return
    sequences = [sequence_of(length, page_size, 10_000 * row) for row, length in enumerate(lengths)]
    plan = plans.build(sequences, num_rows)
    all_lengths = lengths + [1] * num_padding
    tables = plan[plans.positions(num_rows).stop :]
    assert plan[plans.positions(num_rows)].tolist() == [length - 1 for length in all_lengths]
    num_items = int(plan[0])
    assert num_items <= plans.max_items(num_rows)
    items = plan[HEAD_SIZE : HEAD_SIZE + num_items * ITEM_SIZE].reshape(num_items, ITEM_SIZE).tolist()
    # Row after row, the parts of a row in order: what the last block of a row relies on.
    assert [item[0] for item in items] == sorted(item[0] for item in items)
    for row, row_length in enumerate(all_lengths):
        mine = [item for item in items if item[0] == row]
        begins, ends = [item[1] for item in mine], [item[2] for item in mine]
        assert begins == [0, *ends[:-1]] and ends[-1] == row_length
        assert all(begin % TILE == 0 for begin in begins)
        start = mine[0][4]
        for number, item in enumerate(mine):
            assert item[3:] == [row_length, start, number, len(mine), 0]
        pages = sequences[row].page_ids[: -(-row_length // page_size)] if row < len(lengths) else [DUMMY_PAGE]
        assert tables[start : start + len(pages)].tolist() == list(pages)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("max_batch_size", [1, 24, 64, 96, 128])
@pytest.mark.parametrize("max_pages", [1, 8, 32, 128])
def test_memory_for_all_sizes_holds_the_plan_of_each(num_kv_heads: int, max_batch_size: int, max_pages: int) -> None:
    plans = plan_of(num_kv_heads)
    sizes = range(1, max_batch_size + 1)
    room = max(plans.size(size, size * max_pages + 1) for size in sizes)
    for size in sizes:
        sequences = [sequence_of(max_pages * 16, 16, 0) for _ in range(size)]
        assert len(plans.build(sequences, size)) <= room
        assert len(plans.build(sequences[:1], size)) <= room


def test_one_long_sequence_among_short_ones_gets_most_items() -> None:
    plans = plan_of(8)
    plan = plans.build([sequence_of(n, 16, 0) for n in (30_000, *[100] * 20)], 21)
    items = plan[HEAD_SIZE : HEAD_SIZE + int(plan[0]) * ITEM_SIZE].reshape(-1, ITEM_SIZE)
    assert (items[:, 0] == 0).sum() > 20
    assert all((items[:, 0] == row).sum() == 1 for row in range(1, 21))
