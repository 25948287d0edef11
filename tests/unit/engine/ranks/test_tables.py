"""Copies of page tables, of which there are few."""

import weakref

import numpy as np
import pytest

from tandem.engine.kvcache.page_table import PageTable
from tandem.engine.ranks.tables import TableWriter
from tandem.engine.token_sequence import TokenSequence

PAGE_SIZE = 4
LENS = np.array([PAGE_SIZE] * 2, np.int32)


@pytest.mark.parametrize("num_copies", [2, 3, 5])
def test_copies_of_tables_give_way_to_new_ones(num_copies: int) -> None:
    writer = TableWriter(PAGE_SIZE, num_copies)
    sequences = [TokenSequence([0] * PAGE_SIZE, PAGE_SIZE, PageTable([page_id])) for page_id in range(8)]
    copies: dict[int, list[int]] = {}
    for pair in ([0, 1], [1, 2], [3, 4], [0, 2], [4, 5], [3, 1], [6, 7], [3, 0], [0, 6], [1, 2]):
        chosen = [sequences[i] for i in pair]
        copy_ids, _, updates = writer.update(chosen, LENS, None, ())
        assert not any(updates.firsts) and set(updates.counts.tolist()) <= {1}
        copies.update((copy_id, [page]) for copy_id, page in zip(updates.copy_ids, updates.page_ids, strict=True))
        assert [copies[copy_id] for copy_id in copy_ids.tolist()] == [list(s.page_ids) for s in chosen]
    assert len(copies) == num_copies


def test_the_copy_of_an_ended_request_is_the_next_ones() -> None:
    """Otherwise the leader and its followers would keep thousands of page tables of ended requests."""
    writer = TableWriter(PAGE_SIZE)
    copies = set()
    for page_id in range(50):
        sequence = TokenSequence([0] * PAGE_SIZE, PAGE_SIZE, table := PageTable([page_id]))
        copies.update(writer.update([sequence], LENS[:1], None, ())[0].tolist())
        if page_id % 2:
            # It then has no copy of its own to give back.
            table.replace(0, 99)
        ended = weakref.ref(table)
        del sequence, table
        assert ended() is None
    assert len(copies) == 1
