"""Copies between a pool in host memory and the region, in one thread for each direction."""

from collections.abc import Sequence

import numpy as np

from tandem.pagestore.client.copy_thread import CopyThread, TwoWayCopies


class CpuRegionCopies(TwoWayCopies):
    def __init__(self, pool: np.ndarray, region: np.ndarray) -> None:
        """
        Args:
            pool: (num_pages, page_bytes) uint8.
            region: (num_slots, page_bytes) uint8.
        """
        assert pool.shape[1] == region.shape[1]
        super().__init__(
            CopyThread("copy-out", lambda pages, slots: _copy_rows(pool, pages, region, slots)),
            CopyThread("copy-in", lambda slots, pages: _copy_rows(region, slots, pool, pages)),
        )


def _copy_rows(source: np.ndarray, rows: Sequence[int], destination: np.ndarray, to_rows: Sequence[int]) -> None:
    """Copies rows, each without the interpreter's lock."""
    for row, to_row in zip(rows, to_rows, strict=True):
        destination[to_row] = source[row]
