"""Rows of a forward pass with their adapters."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tandem.engine.adapters.base import NO_ADAPTER
from tandem.engine.upload import Packed, aligned

Int32s = np.ndarray[Any, np.dtype[np.int32]]
# Rows of a tile, from a number of rows on. Larger tiles read adapters less often, smaller ones waste fewer products.
TILE_ROWS = ((0, 16), (512, 32), (2048, 64))


class AdapterRows(NamedTuple):
    """Rows grouped by slot, those without an adapter last. A tile has rows of one slot.

    Attributes:
        order: (num_rows,) int32, row numbers.
        tile_slots: (most tiles,) int32; NO_ADAPTER: its rows have none.
        tile_begins, tile_ends: (most tiles,) int32, of the tile's rows in `order`.
        num_tiles: (3,) int32: tiles with adapters, all, and adapters.
        row_slots: (num_rows,) int32, of each row.
        adapter_slots: (most adapters,) int32, each slot of the rows once.
        tile_rows: most rows of a tile.
        has_adapters: False: no row has one, now or in a later run of a graph.
    """

    order: torch.Tensor
    tile_slots: torch.Tensor
    tile_begins: torch.Tensor
    tile_ends: torch.Tensor
    num_tiles: torch.Tensor
    row_slots: torch.Tensor
    adapter_slots: torch.Tensor
    tile_rows: int
    has_adapters: bool = True

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """What all kernels read of the tiles, in the order of their arguments."""
        return self.order, self.tile_slots, self.tile_begins, self.tile_ends, self.num_tiles

    @classmethod
    def of(cls, slots: Int32s, device: torch.device) -> "AdapterRows":
        """Uploads without waiting. Args: slots: of each row, (num_rows,); NO_ADAPTER for none."""
        tile_rows = tile_rows_for(len(slots))
        tiles = grouped(slots, tile_rows)
        return cls.made_of(Packed(*tiles).to(device), tile_rows, has_adapters=bool(tiles.num[0]))

    @classmethod
    def made_of(cls, tensors: Sequence[torch.Tensor], tile_rows: int, *, has_adapters: bool) -> "AdapterRows":
        """Args: tensors: in the order of the attributes."""
        order, tile_slots, begins, ends, num_tiles, row_slots, adapter_slots = tensors
        return cls(order, tile_slots, begins, ends, num_tiles, row_slots, adapter_slots, tile_rows, has_adapters)


class Tiles(NamedTuple):
    """Attributes: as of AdapterRows."""

    order: Int32s
    slots: Int32s
    begins: Int32s
    ends: Int32s
    num: Int32s
    row_slots: Int32s
    adapters: Int32s


def tile_rows_for(num_rows: int) -> int:
    return max(size for least, size in TILE_ROWS if num_rows >= least)


def grouped(slots: Int32s, tile_rows: int) -> Tiles:
    """Args: slots: of each row."""
    # Rows without an adapter behind all slots.
    keys = np.where(slots == NO_ADAPTER, np.iinfo(np.int32).max, slots)
    order = np.argsort(keys, kind="stable")
    found, firsts, counts = np.unique(keys[order], return_index=True, return_counts=True)
    num_tiles = -(-counts // tile_rows)
    ends = np.repeat(firsts + counts, num_tiles)
    # Of each tile, its number within its slot.
    within = np.arange(num_tiles.sum()) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    begins = np.repeat(firsts, num_tiles) + tile_rows * within
    of_slots = slots[order[begins]]
    adapters = found[found != np.iinfo(np.int32).max]
    num = (of_slots != NO_ADAPTER).sum(), len(of_slots), len(adapters)
    ends = np.minimum(begins + tile_rows, ends)
    tiles = (order, of_slots, begins, ends, np.array(num), slots, adapters)
    return Tiles(*(numbers.astype(np.int32) for numbers in tiles))


class GraphedRows:
    """Rows of a graph, in memory that it reads whenever it runs."""

    def __init__(self, num_rows: int, num_slots: int, device: torch.device) -> None:
        self._tile_rows = tile_rows_for(num_rows)
        # Each slot may have a tile that is not full, and the rows without an adapter too.
        self._most_tiles = num_rows // self._tile_rows + min(num_rows, num_slots + 1)
        self._most_adapters = min(num_rows, num_slots)
        self._num_rows = num_rows
        self._staged: bytes | None = None
        packed = self._packed(np.full(num_rows, NO_ADAPTER, np.int32))
        self._memory = torch.zeros(aligned(packed.num_bytes), dtype=torch.uint8, device=device)
        self.rows = AdapterRows.made_of(packed.views(self._memory), self._tile_rows, has_adapters=True)
        # Until the first `stage`, no row has an adapter.
        packed.copy_to(self._memory)

    def stage(self, slots: Int32s) -> None:
        """Args: slots: of the first rows; the others have none. The same as before are not copied again."""
        content = slots.tobytes()
        if content != self._staged:
            self._staged = content
            self._packed(slots).copy_to(self._memory)

    def _packed(self, slots: Int32s) -> Packed:
        of_rows = np.full(self._num_rows, NO_ADAPTER, np.int32)
        of_rows[: len(slots)] = slots
        order, *of_tiles, num, row_slots, found = grouped(of_rows, self._tile_rows)
        tiles = np.zeros((3, self._most_tiles), np.int32)
        tiles[:, : num[1]] = of_tiles
        adapters = np.zeros(self._most_adapters, np.int32)
        adapters[: num[2]] = found
        return Packed(order, *tiles, num, row_slots, adapters)
