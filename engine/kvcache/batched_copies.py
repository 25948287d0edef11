"""Many pages in one call of the driver's batched copy. Imported on CUDA machines alone.

The driver is called through ctypes with arrays that numpy fills: cuda-python would make an object of each address,
which takes 0.8 us a page, a seventh of what its copy takes.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

# CUmemcpySrcAccessOrder: the source is read in the stream's order.
_IN_STREAM_ORDER = 1


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes; where the memory lies, the driver finds out."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("destination_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class PageCopies:
    """Copies of pages of one size."""

    def __init__(self, page_bytes: int) -> None:
        """Raises RuntimeError: the driver is older than CUDA 12.8."""
        self._page_bytes = page_bytes
        self._copy = _driver_function()
        # All copies of a call have the same attributes, from the first on.
        self._attributes = _Attributes(_IN_STREAM_ORDER)
        self._first = ctypes.c_size_t(0)

    def addresses(self, base: int, page_ids: Sequence[int]) -> "np.ndarray[Any, np.dtype[np.uint64]]":
        """Of these pages, in memory of pages that begins at `base`."""
        return np.uint64(base) + np.asarray(page_ids, dtype=np.uint64) * np.uint64(self._page_bytes)

    def copy(
        self,
        dst: "np.ndarray[Any, np.dtype[np.uint64]]",
        src: "np.ndarray[Any, np.dtype[np.uint64]]",
        stream: int,
    ) -> None:
        """Copies pages between these addresses, (num_pages,) each, in a stream's order. The legacy stream is refused.

        Raises:
            RuntimeError: the driver refused.
        """
        sizes = np.full(len(src), self._page_bytes, dtype=np.uint64)
        failed = ctypes.c_size_t(0)
        status = self._copy(
            dst.ctypes.data,
            src.ctypes.data,
            sizes.ctypes.data,
            len(src),
            ctypes.byref(self._attributes),
            ctypes.byref(self._first),
            1,
            ctypes.byref(failed),
            stream,
        )
        if status:
            raise RuntimeError(f"a batch of {len(src)} copies failed with CUDA error {status}, at copy {failed.value}")


@cache
def _driver_function() -> Any:
    try:
        function = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync
    except (OSError, AttributeError) as error:
        raise RuntimeError(
            f"the driver has no batched copies, which CUDA 12.8 is the first to have: {error}"
        ) from error
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    function.argtypes = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
    function.restype = ctypes.c_int
    return function
