"""The memory of a worker's pages."""

import mmap
import os
import weakref
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.host_memory import available_memory_bytes


class SharedPoolFile(NamedTuple):
    """Where another process of this host finds a CPU pool: /proc/<pid>/fd/<fd>, a memfd of this name."""

    pid: int
    fd: int
    name: str
    num_bytes: int


class KvPool(ABC):
    """The memory of every page of a worker. What is inside a page, only attention backends know.

    Attributes:
        memory: (num_pages, page_bytes) uint8, contiguous.
        device: where it is.
    """

    def __init__(self, layout: PageLayout, num_pages: int, memory: torch.Tensor) -> None:
        """Args: memory: as the attribute."""
        self.layout = layout
        self.num_pages = num_pages
        self.memory = memory
        self.device = memory.device

    @abstractmethod
    def close(self) -> None:
        """Lets nobody else map the pool any more."""


class CpuKvPool(KvPool):
    """Pages in a memfd: another process of the same user and host maps it through /proc, and the kernel frees it with
    the last process that holds it, so that no kill leaves it behind.

    Attributes:
        file: where another process finds it.
    """

    def __init__(self, layout: PageLayout, num_pages: int, name: str) -> None:
        """Allocates zeroed pages.

        Args:
            name: unique among all pools ever made on this host (the worker's incarnation); at most 200 characters.

        Raises:
            ValueError: the pool does not fit into the memory that is free.
        """
        num_bytes = num_pages * layout.page_bytes
        available = available_memory_bytes()
        if num_bytes > available:
            raise ValueError(
                f"a pool of {num_pages} pages of {layout.page_bytes} bytes needs {num_bytes / 2**20:.0f} MiB, but "
                f"only {available / 2**20:.0f} MiB of memory are free; use fewer pages"
            )
        fd = os.memfd_create(f"tandem-pool-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        self._close_fd = weakref.finalize(self, os.close, fd)
        self._mmap = mmap.mmap(fd, num_bytes)
        self.file = SharedPoolFile(os.getpid(), fd, f"tandem-pool-{name}", num_bytes)
        memory = torch.frombuffer(self._mmap, dtype=torch.uint8)
        super().__init__(layout, num_pages, memory.view(num_pages, layout.page_bytes))

    def close(self) -> None:
        """The memory goes with the last tensor or mapping that refers to it."""
        self._close_fd()
