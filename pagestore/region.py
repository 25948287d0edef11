"""The region: host memory of one node that all workers of a cluster map, cut into slots of one page."""

import fcntl
import mmap
import os
from typing import Self

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
GIB = 2**30
# Unit of st_blocks.
BLOCK_BYTES = 512


def check_region(num_bytes: int, available_bytes: int) -> None:
    """Raises ValueError: a region exceeds the host's free memory."""
    if num_bytes > available_bytes:
        raise ValueError(
            f"store_memory is {num_bytes / GIB:.2f} GiB, but only {available_bytes / GIB:.2f} GiB of memory are free: "
            "use a smaller store_memory, or end what else uses the memory"
        )


class Region:
    """A memfd. The kernel frees it with its last descriptor and mapping.

    Attributes:
        num_bytes: its size, which nobody can change.
    """

    def __init__(self, fd: int) -> None:
        """Args: fd: becomes this object's."""
        self.num_bytes = os.fstat(fd).st_size
        self._fd = fd

    @classmethod
    def create(cls, num_bytes: int, available_bytes: int) -> Self:
        """Creates a zeroed region. It takes memory as it is written to.

        Args:
            available_bytes: free memory of the host.

        Raises:
            ValueError: the region exceeds it.
        """
        check_region(num_bytes, available_bytes)
        fd = os.memfd_create("tandem-page-store", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # Readable only by this user's processes, also through /proc.
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, num_bytes)
        # A mapping of a shrunk file kills its readers.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd)

    @property
    def num_untouched_bytes(self) -> int:
        """Bytes that take no memory yet."""
        return max(0, self.num_bytes - BLOCK_BYTES * os.fstat(self._fd).st_blocks)

    def fileno(self) -> int:
        return self._fd

    def map(self) -> mmap.mmap:
        """Maps all of the region for reading and writing."""
        return mmap.mmap(self._fd, self.num_bytes)

    def close(self) -> None:
        """Closes the descriptor. Mappings stay."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
