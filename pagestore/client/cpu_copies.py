"""Copies between a pool in host memory and the region, in one thread for each direction."""

from collections.abc import Sequence

import numpy as np

from tandem.pagestore.client.base import RegionCopies, RegionCopy
from tandem.pagestore.client.copy_thread import CopyThread


class CpuRegionCopies(RegionCopies):
    def __init__(self, pool: np.ndarray, region: np.ndarray) -> None:
        """
        Args:
            pool: (num_pages, page_bytes) uint8.
            region: (num_slots, page_bytes) uint8.
        """
        assert pool.shape[1] == region.shape[1]
        self._out = CopyThread("copy-out", lambda pages, slots: _copy_rows(pool, pages, region, slots))
        self._in = CopyThread("copy-in", lambda slots, pages: _copy_rows(region, slots, pool, pages))

    def copy_out(self, page_ids: Sequence[int], slots: Sequence[int]) -> RegionCopy:
        return self._out.start(page_ids, slots)

    def copy_in(self, slots: Sequence[int], page_ids: Sequence[int]) -> RegionCopy:
        return self._in.start(slots, page_ids)

    def close(self) -> None:
        self._out.close()
        self._in.close()


def _copy_rows(source: np.ndarray, rows: Sequence[int], destination: np.ndarray, to_rows: Sequence[int]) -> None:
    """Copies rows, each without the interpreter's lock."""
    for row, to_row in zip(rows, to_rows, strict=True):
        destination[to_row] = source[row]
