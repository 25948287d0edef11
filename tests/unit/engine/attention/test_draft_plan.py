"""Plans of steps with drafts cover every token of every sequence once for each of its tiles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.attention.draft_plan import ITEM_SIZE, ROW_SIZE, DraftPlans
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.token_sequence import TokenSequence

DUMMY_PAGE = 9_999
BLOCK = 64


def sequence_of(cached_len: int, num_drafts: int, page_size: int, first_page: int) -> TokenSequence:
    num_pages = -(-(cached_len + 1 + num_drafts) // page_size) + 1
    pages = range(first_page, first_page + num_pages)
    sequence = TokenSequence([0] * (cached_len + 1), 1, pages, cached_len=cached_len)
    sequence.draft_ids = (0,) * num_drafts
    sequence.extend(1 + num_drafts)
    return sequence


@given(
    page_size=st.sampled_from([1, 3, 16, 64]),
    tile=st.sampled_from([1, 4, 8]),
    num_programs=st.sampled_from([1, 17, 66, 528]),
    lengths=st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 11)), max_size=12),
    num_padding=st.integers(0, 5),
)
def test_items_cover_every_token_once(
    page_size: int, tile: int, num_programs: int, lengths: list[tuple[int, int]], num_padding: int
) -> None:
    layout = KvHeadLayout(2, page_size, 8, 64, "bfloat16")
    plans = DraftPlans(layout, DUMMY_PAGE, tile=tile, block=BLOCK, num_programs=num_programs)
    sequences = [sequence_of(*length, page_size, 10_000 * (n + 1)) for n, length in enumerate(lengths)]
    num_rows = sum(s.extend_len for s in sequences) + num_padding
    if not num_rows:
        return
    plan = plans.build(sequences, num_rows)
    items = plan.items.reshape(-1, ITEM_SIZE)
    assert len(items) == plans.max_items(num_rows)
    items = items[: int((items[:, 1] > 0).sum())]
    rows = plan.rows.reshape(num_rows, ROW_SIZE)
    of_rows = [(s, p) for s in sequences for p in range(s.cached_len, s.device_len)]
    for row, (first_item, num_items, query, _) in enumerate(rows.tolist()):
        of_tile = items[first_item : first_item + num_items].tolist()
        assert all(item[0] == row - query and query < item[1] <= tile for item in of_tile)
        assert all(item[6] == (num_items == 1) for item in of_tile)
        # Without gaps, up to the tile's last token, each from a token on that the tile's first query sees.
        begins, ends = [item[4] for item in of_tile], [item[5] for item in of_tile]
        assert begins == [0, *ends[:-1]] and all(begin % BLOCK == 0 for begin in begins)
        assert ends[-1] == of_tile[0][2] + of_tile[0][1] and begins[-1] <= of_tile[0][2]
        first_page = of_tile[0][3]
        if row >= len(of_rows):
            assert (plan.positions[row], plan.pages[first_page]) == (0, DUMMY_PAGE)
            assert plan.slots[row] == DUMMY_PAGE * page_size
            continue
        sequence, position = of_rows[row]
        assert plan.positions[row] == position == of_tile[0][2] + query
        pages = plan.pages[first_page : first_page + layout.num_pages_for(sequence.device_len)]
        assert pages.tolist() == list(sequence.page_ids[: len(pages)])
        assert plan.slots[row] == sequence.page_ids[position // page_size] * page_size + position % page_size


@pytest.mark.parametrize(("num_sequences", "num_items"), [(1, 63), (4, 64), (200, 200)])
def test_items_fill_the_gpu(num_sequences: int, num_items: int) -> None:
    layout = KvHeadLayout(2, 16, 8, 128, "bfloat16")
    plans = DraftPlans(layout, DUMMY_PAGE, tile=8, block=BLOCK, num_programs=66)
    sequences = [sequence_of(8_000, 7, 16, 1_000 * n) for n in range(num_sequences)]
    items = plans.build(sequences, 8 * num_sequences).items.reshape(-1, ITEM_SIZE)
    assert (items[:, 1] > 0).sum() == num_items
