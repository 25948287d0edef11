"""Copies of page tables, of which there are few."""

import numpy as np
import pytest

from tandem.engine.kvcache.page_table import PageTable
from tandem.engine.ranks.tables import TableWriter
from tandem.engine.token_sequence import TokenSequence

PAGE_SIZE = 4


@pytest.mark.parametrize("num_copies", [2, 3])
def test_copies_of_tables_give_way_to_new_ones(num_copies: int) -> None:
    writer = TableWriter(PAGE_SIZE, num_copies)
    sequences = [TokenSequence([0] * PAGE_SIZE, PAGE_SIZE, PageTable([page_id])) for page_id in range(4)]
    copies: dict[int, list[int]] = {}
    for pair in ([0, 1], [1, 2], [0, 2], [3, 1], [3, 0], [0, 3], [1, 2]):
        chosen = [sequences[i] for i in pair]
        copy_ids, updates = writer.update(chosen, np.array([PAGE_SIZE] * 2, np.int32))
        for copy_id, first, page_ids in updates:
            assert not first
            copies[copy_id] = list(page_ids)
        assert [copies[copy_id] for copy_id in copy_ids.tolist()] == [list(s.page_ids) for s in chosen]
    assert len(copies) == num_copies
