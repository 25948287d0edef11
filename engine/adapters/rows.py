"""Rows of a forward pass with their adapters."""

from typing import Any, NamedTuple

import numpy as np
import torch

from tandem.engine.adapters.base import NO_ADAPTER
from tandem.engine.upload import Packed, aligned

Int32s = np.ndarray[Any, np.dtype[np.int32]]
# Rows of a tile, from a number of rows on. Larger tiles read adapters less often, smaller ones waste fewer products.
TILE_ROWS = ((0, 16), (512, 32), (2048, 64))


class AdapterRows(NamedTuple):
    """Rows that have adapters, grouped by slot. A tile has rows of one slot.

    Attributes:
        order: (num_rows,) int32, row numbers, those of a slot together. Only those within tiles count.
        tile_slots: (num_tiles,) int32; NO_ADAPTER: the tile is empty.
        tile_begins, tile_ends: (num_tiles,) int32, of the tile's rows in `order`.
        tile_rows: most rows of a tile.
    """

    order: torch.Tensor
    tile_slots: torch.Tensor
    tile_begins: torch.Tensor
    tile_ends: torch.Tensor
    tile_rows: int

    @classmethod
    def of(cls, slots: Int32s, device: torch.device) -> "AdapterRows":
        """Uploads without waiting. Args: slots: of each row, (num_rows,); NO_ADAPTER for none."""
        tile_rows = tile_rows_for(len(slots))
        order, tile_slots, begins, ends = Packed(*grouped(slots, tile_rows)).to(device)
        return cls(order, tile_slots, begins, ends, tile_rows)


def tile_rows_for(num_rows: int) -> int:
    return max(size for least, size in TILE_ROWS if num_rows >= least)


def grouped(slots: Int32s, tile_rows: int) -> tuple[Int32s, Int32s, Int32s, Int32s]:
    """Returns order, tile_slots, tile_begins and tile_ends of AdapterRows, without empty tiles. Args: slots: of each
    row."""
    (order,) = np.nonzero(slots != NO_ADAPTER)
    order = order[np.argsort(slots[order], kind="stable")]
    present, firsts, counts = np.unique(slots[order], return_index=True, return_counts=True)
    num_tiles = -(-counts // tile_rows)
    ends = np.repeat(firsts + counts, num_tiles)
    # Of each tile, its number within its slot.
    within = np.arange(num_tiles.sum()) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    begins = np.repeat(firsts, num_tiles) + tile_rows * within
    of_slots, ends = np.repeat(present, num_tiles), np.minimum(begins + tile_rows, ends)
    return order.astype(np.int32), of_slots.astype(np.int32), begins.astype(np.int32), ends.astype(np.int32)


class GraphedRows:
    """Rows of a graph, in memory that it reads whenever it runs."""

    def __init__(self, num_rows: int, num_slots: int, device: torch.device) -> None:
        self._tile_rows = tile_rows_for(num_rows)
        # Each slot may have a tile that is not full.
        self._num_tiles = num_rows // self._tile_rows + min(num_rows, num_slots)
        self._num_rows = num_rows
        self._staged: bytes | None = None
        packed = self._packed(np.full(num_rows, NO_ADAPTER, np.int32))
        self._memory = torch.zeros(aligned(packed.num_bytes), dtype=torch.uint8, device=device)
        order, slots, begins, ends = packed.views(self._memory)
        self.rows = AdapterRows(order, slots, begins, ends[: self._num_tiles], self._tile_rows)
        slots.fill_(NO_ADAPTER)

    def stage(self, slots: Int32s) -> None:
        """Args: slots: of the first rows; the others have none. The same as before are not copied again."""
        content = slots.tobytes()
        if content != self._staged:
            self._staged = content
            self._packed(slots).copy_to(self._memory)

    def _packed(self, slots: Int32s) -> Packed:
        order, *tiles = grouped(slots, self._tile_rows)
        arrays = [np.zeros(self._num_rows, np.int32), *(np.zeros(self._num_tiles, np.int32) for _ in tiles)]
        arrays[1].fill(NO_ADAPTER)
        for array, numbers in zip(arrays, (order, *tiles), strict=True):
            array[: len(numbers)] = numbers
        return Packed(*arrays)
