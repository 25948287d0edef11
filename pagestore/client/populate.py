"""Takes memory of a mapping before its first use, by several threads: the kernel zeroes a page when it is first used.

One thread, as in a driver's call that pins memory, takes only one to two GiB a second.
"""

import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

MAX_THREADS = 16
CHUNK_BYTES = 64 * 2**20
# <linux/mman.h>; Python's mmap module lacks it.
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def populated(address: int, num_bytes: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields (offset, size) of each piece as soon as it has memory. Threads go on with the next ones meanwhile.

    Kernels before 5.14 cannot do this: there pieces come without memory. A process that lacks memory is told so by what
    it does with a piece.

    Args:
        address: of writable shared memory; begins at a page of the operating system, as does each piece.
        piece_bytes: size of all pieces but the last.
    """
    num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_threads, "populate") as threads:
        pieces = [
            (
                start,
                size := min(piece_bytes, num_bytes - start),
                [
                    threads.submit(
                        _libc.madvise, address + start + at, min(CHUNK_BYTES, size - at), _MADV_POPULATE_WRITE
                    )
                    for at in range(0, size, CHUNK_BYTES)
                ],
            )
            for start in range(0, num_bytes, piece_bytes)
        ]
        try:
            for start, size, chunks in pieces:
                for chunk in chunks:
                    chunk.result()
                yield start, size
        finally:
            threads.shutdown(cancel_futures=True)
