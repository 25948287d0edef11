import mmap
import os
import weakref
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.host_memory import available_memory_bytes


class SharedPoolFile(NamedTuple):
    """Location of a CPU pool for processes of this host: the memfd /proc/<pid>/fd/<fd>."""

    pid: int
    fd: int
    name: str
    num_bytes: int


class KvPool(ABC):
    """
    Attributes:
        memory: (num_pages, page_bytes) uint8, contiguous.
        memory_and_dummy: `memory`, and on a GPU behind it the dummy page for padding rows.
        gpu: PCI id of the GPU; "" on a CPU.
    """

    gpu = ""

    def __init__(self, layout: PageLayout, num_pages: int, memory: torch.Tensor) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.memory = self.memory_and_dummy = memory
        self.device = memory.device

    @abstractmethod
    def close(self) -> None:
        """Prevents further mappings of the pool."""


class PoolRegion(KvPool):
    """A region of all pages, with a layout of its own.

    Attributes:
        memory: (num_pages, layout.page_bytes) uint8. A page's bytes are contiguous, pages are not.
    """

    def __init__(self, pool: KvPool, layout: PageLayout, offset: int) -> None:
        """Args: offset: start of the region in a page, in bytes."""
        columns = slice(offset, offset + layout.page_bytes)
        super().__init__(layout, pool.num_pages, pool.memory[:, columns])
        self.memory_and_dummy = pool.memory_and_dummy[:, columns]

    def close(self) -> None:
        """Does nothing: the pool has the memory."""


class CpuKvPool(KvPool):
    """Pages in a memfd, which the kernel frees with its last holder, even after a kill."""

    def __init__(self, layout: PageLayout, num_pages: int, name: str) -> None:
        """Allocates zeroed pages.

        Args:
            name: unique among all pools of this host, past ones included; at most 200 characters.

        Raises:
            ValueError: the pool exceeds the free memory.
        """
        num_bytes = num_pages * layout.page_bytes
        available = available_memory_bytes()
        if num_bytes > available:
            raise ValueError(
                f"a pool of {num_pages} pages of {layout.page_bytes} bytes needs {num_bytes / 2**20:.0f} MiB, but "
                f"only {available / 2**20:.0f} MiB is free: use fewer pages"
            )
        fd = os.memfd_create(f"tandem-pool-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        self._close_fd = weakref.finalize(self, os.close, fd)
        self._mmap = mmap.mmap(fd, num_bytes)
        self.file = SharedPoolFile(os.getpid(), fd, f"tandem-pool-{name}", num_bytes)
        memory = torch.frombuffer(self._mmap, dtype=torch.uint8)
        super().__init__(layout, num_pages, memory.view(num_pages, layout.page_bytes))

    def close(self) -> None:
        self._close_fd()
