"""Rows grouped by slot, for one forward pass and for a graph."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.adapters.base import NO_ADAPTER
from tandem.engine.adapters.rows import AdapterRows, GraphedRows, grouped, tile_rows_for
from tandem.engine.upload import Packed

CPU = torch.device("cpu")
NUM_SLOTS = 5


def slot_of_each_row(rows: AdapterRows) -> list[int]:
    """Returns the slots, as kernels find them; all rows are in one tile."""
    found: dict[int, int] = {}
    num_adapted, num_all, num_adapters = rows.num_tiles.tolist()
    slots = rows.row_slots.tolist()
    assert rows.adapter_slots[:num_adapters].tolist() == sorted(set(slots) - {NO_ADAPTER})
    for tile in range(num_all):
        slot, begin, end = (int(part[tile]) for part in (rows.tile_slots, rows.tile_begins, rows.tile_ends))
        assert 0 < end - begin <= rows.tile_rows
        assert (slot != NO_ADAPTER) == (tile < num_adapted)
        for row in rows.order[begin:end].tolist():
            assert row not in found
            found[row] = slot
    assert slots == [found[row] for row in range(len(rows.order))]
    return [found[row] for row in range(len(rows.order))]


@given(st.lists(st.integers(NO_ADAPTER, NUM_SLOTS - 1), max_size=80))
def test_every_row_is_in_one_tile_of_its_slot(slots: list[int]) -> None:
    rows = AdapterRows.of(np.array(slots, np.int32), CPU)
    assert slot_of_each_row(rows) == slots
    assert rows.has_adapters == (max(slots, default=NO_ADAPTER) != NO_ADAPTER)


@pytest.mark.parametrize("num_rows", [1, 16, 600, 2048])
def test_a_graph_has_room_for_every_mix(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_to(self: Packed, memory: torch.Tensor) -> None:
        memory[: self.num_bytes].copy_(self._on_host(pinned=False))

    monkeypatch.setattr(Packed, "copy_to", copy_to)
    graphed = GraphedRows(num_rows, NUM_SLOTS, CPU)
    assert slot_of_each_row(graphed.rows) == [NO_ADAPTER] * num_rows
    draw = np.random.default_rng(0)
    # The worst mix: each slot fills all its tiles but the last one, which has one row.
    size = tile_rows_for(num_rows)
    worst = np.repeat(np.arange(NO_ADAPTER, NUM_SLOTS, dtype=np.int32), size + 1)[:num_rows]
    for slots in (worst, draw.integers(NO_ADAPTER, NUM_SLOTS, num_rows).astype(np.int32), worst[: num_rows // 2]):
        graphed.stage(slots)
        assert slot_of_each_row(graphed.rows) == [*slots.tolist(), *[NO_ADAPTER] * (num_rows - len(slots))]


def test_large_batches_have_large_tiles() -> None:
    assert [tile_rows_for(num_rows) for num_rows in (1, 511, 512, 2048)] == [16, 16, 32, 64]
    tiles = grouped(np.zeros(2048, np.int32), 64)
    assert len(tiles.slots) == 32
