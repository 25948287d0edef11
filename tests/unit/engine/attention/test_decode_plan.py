"""Decode plans cover every token of every sequence once, within their memory."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.attention.decode_plan import HEAD_SIZE, ITEM_COST, ITEM_SIZE, TILE, DecodePlan
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.token_sequence import TokenSequence

DUMMY_PAGE = 9_999


def plan_of(num_kv_heads: int, page_size: int = 16, num_sms: int = 132) -> DecodePlan:
    return DecodePlan(KvHeadLayout(2, page_size, num_kv_heads, 64, "bfloat16"), num_sms, DUMMY_PAGE)


def sequence_of(num_tokens: int, page_size: int, first_page: int) -> TokenSequence:
    num_pages = -(-num_tokens // page_size) + 1
    sequence = TokenSequence([0] * num_tokens, 1, range(first_page, first_page + num_pages), cached_len=num_tokens - 1)
    sequence.extend(1)
    return sequence


def items_of_blocks(plans: DecodePlan, plan: Any, num_rows: int) -> list[int]:
    """Return the first item of each block, then the number of items."""
    start = HEAD_SIZE + ITEM_SIZE * plans.max_items(num_rows)
    numbers: list[int] = plan[start : start + int(plan[0]) + 1].tolist()
    assert start + len(numbers) <= plans.positions(num_rows).start
    return numbers


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
    num_blocks = int(plan[0])
    assert 1 <= num_blocks <= plans.max_blocks(num_rows)
    first_items = items_of_blocks(plans, plan, num_rows)
    assert first_items[0] == 0 and first_items == sorted(set(first_items))
    num_items = first_items[-1]
    assert num_items <= plans.max_items(num_rows)
    items = plan[HEAD_SIZE : HEAD_SIZE + num_items * ITEM_SIZE].reshape(num_items, ITEM_SIZE).tolist()
    # A row's last block relies on this order.
    assert [item[0] for item in items] == sorted(item[0] for item in items)
    for row, row_length in enumerate(all_lengths):
        mine = [item for item in items if item[0] == row]
        begins, ends = [item[1] for item in mine], [item[2] for item in mine]
        assert begins == [0, *ends[:-1]] and ends[-1] == row_length
        assert all(begin % plans.blocks(num_rows).cut == 0 for begin in begins)
        start = mine[0][4]
        for number, item in enumerate(mine):
            assert item[3:] == [row_length, start, number, len(mine), 0]
        pages = sequences[row].page_ids[: -(-row_length // page_size)] if row < len(lengths) else [DUMMY_PAGE]
        assert tables[start : start + len(pages)].tolist() == list(pages)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("max_batch_size", [1, 24, 64, 96, 128])
@pytest.mark.parametrize("max_pages", [1, 8, 32, 128])
def test_memory_holds_the_plan_of_every_size(num_kv_heads: int, max_batch_size: int, max_pages: int) -> None:
    plans = plan_of(num_kv_heads)
    sizes = range(1, max_batch_size + 1)
    room = max(plans.size(size, size * max_pages + 1) for size in sizes)
    for size in sizes:
        sequences = [sequence_of(max_pages * 16, 16, 0) for _ in range(size)]
        assert len(plans.build(sequences, size)) <= room
        assert len(plans.build(sequences[:1], size)) <= room


@pytest.mark.parametrize(
    "lengths",
    [[30_000, *[100] * 20], [1152] * 128, [1152] * 8, [*range(1, 4000, 37)], [100] * 256],
    ids=lambda v: len(v),
)
def test_blocks_have_similar_work(lengths: list[int]) -> None:
    plans, num_rows = plan_of(8), len(lengths)
    plan = plans.build([sequence_of(n, 16, 0) for n in lengths], num_rows)
    first_items = items_of_blocks(plans, plan, num_rows)
    items = plan[HEAD_SIZE : HEAD_SIZE + first_items[-1] * ITEM_SIZE].reshape(-1, ITEM_SIZE)
    turn = plans.blocks(num_rows).turn
    costs = [
        sum(-(-int(end - begin) // turn) + ITEM_COST for _, begin, end, *_ in items[start:stop])
        for start, stop in itertools.pairwise(first_items)
    ]
    # Cuts are at whole turns, and a cut row costs one more item.
    assert max(costs) <= sum(costs) / plans.max_blocks(num_rows) + 1 + ITEM_COST


@pytest.mark.parametrize(("num_rows", "num_kv_heads"), [(1, 4), (3, 4), (8, 4), (16, 4), (2, 8), (8, 8), (16, 8)])
def test_few_equal_rows_have_equal_items_in_blocks_of_their_own(num_rows: int, num_kv_heads: int) -> None:
    plans = plan_of(num_kv_heads)
    plan = plans.build([sequence_of(4_000, 16, 0) for _ in range(num_rows)], num_rows)
    first_items = items_of_blocks(plans, plan, num_rows)
    assert [stop - start for start, stop in itertools.pairwise(first_items)] == [1] * int(plan[0])
    items = plan[HEAD_SIZE : HEAD_SIZE + first_items[-1] * ITEM_SIZE].reshape(-1, ITEM_SIZE)
    assert len({int(item[6]) for item in items}) == 1
    # The cut at the end of a row may be shorter.
    lengths = [-(-int(end - begin) // TILE) for _, begin, end, *_ in items]
    assert max(lengths) - min(lengths) <= 1
