"""A pool on the GPU and a registered region. Imported on CUDA machines only."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.page_store.copies import Ends
from benchmarks.rows import Row
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.cuda_pool import CudaKvPool
from tandem.engine.models.config import ModelConfig
from tandem.pagestore.client.cuda_copies import GIB, CudaRegionCopies
from tandem.pagestore.region import Region


@dataclass(frozen=True)
class _OpaqueLayout(PageLayout):
    """Pages of num_bytes bytes each, without keys and values."""

    page_size: int
    num_bytes: int

    @classmethod
    def of(cls, config: ModelConfig, page_size: int, dtype: str, quantized_to: str = "") -> "_OpaqueLayout":
        raise AssertionError("no model has such pages")

    @property
    def page_bytes(self) -> int:
        return self.num_bytes

    @property
    def tag(self) -> str:
        return "opaque"


class CudaEnds(Ends):
    """The plain copy is one cudaMemcpyAsync of all bytes to memory that CUDA allocated pinned."""

    def __init__(self, page_bytes: int, num_pages: int) -> None:
        self.page_bytes, self.num_pages = page_bytes, num_pages
        device = torch.device("cuda", 0)
        self._pool = CudaKvPool(_OpaqueLayout(16, page_bytes), num_pages, device)
        self._memory = Region.create(num_pages * page_bytes, num_pages * page_bytes)
        region = np.frombuffer(self._memory.map(), np.uint8).reshape(num_pages, page_bytes)
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.copies = CudaRegionCopies(self._pool, region)
        self._register_s = time.perf_counter() - began
        self._pinned = torch.empty((num_pages, page_bytes), dtype=torch.uint8, pin_memory=True)

    def plain_out(self) -> float:
        return self._seconds_of(lambda: self._pinned.copy_(self._pool.memory, non_blocking=True))

    def plain_in(self) -> float:
        return self._seconds_of(lambda: self._pool.memory.copy_(self._pinned, non_blocking=True))

    def rows(self) -> list[Row]:
        gib = self.num_pages * self.page_bytes / GIB
        return [Row(f"registering {gib:g} GiB", self._register_s / gib, "s/GiB")]

    def close(self) -> None:
        super().close()
        self._memory.close()

    def _seconds_of(self, copy: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        return time.perf_counter() - began
