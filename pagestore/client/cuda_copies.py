"""Copies between a GPU's pool and the region, by the GPU's copy engines. Imported on CUDA machines only."""

import logging
import math
import mmap
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from cuda.bindings import runtime

from tandem.engine.kvcache.batched_copies import PageCopies
from tandem.engine.kvcache.cuda_pool import CudaKvPool, check
from tandem.pagestore.client.base import RegionCopies, RegionCopy
from tandem.pagestore.client.copy_thread import CopyThread
from tandem.pagestore.client.populate import populated

logger = logging.getLogger(__name__)

GIB = 2**30
# Bytes that one call registers: the driver fails at some hundred GiB.
MAX_REGISTERED_BYTES = GIB
# Bytes submitted at once, and batches submitted before the first has ended. A copy engine may take the copies of all
# streams in order of submission: then the small copies of a forward pass wait for all that is submitted here.
BATCH_BYTES, MAX_SUBMITTED = 8 * 2**20, 2


class RegisteredMemory:
    """Host memory that the GPU reads and writes directly.

    Registered in several pieces. CUDA rejects a copy across two of them, so none ends within a page.
    """

    def __init__(self, address: int, num_bytes: int, page_bytes: int) -> None:
        """Registers memory with the current device. It begins at a page of the operating system.

        Raises:
            RuntimeError: CUDA or this class refuses it. Then nothing stays registered.
        """
        self._check_device()
        step = math.lcm(page_bytes, mmap.PAGESIZE)
        piece_bytes = MAX_REGISTERED_BYTES // step * step
        if not piece_bytes:
            raise RuntimeError(
                f"pages of {page_bytes} bytes do not end with a page of the operating system within "
                f"{MAX_REGISTERED_BYTES} bytes, so the GPU cannot register them"
            )
        self._pieces: list[int] = []
        began = time.monotonic()
        for start, size in populated(address, num_bytes, piece_bytes):
            try:
                check(runtime.cudaHostRegister(address + start, size, runtime.cudaHostRegisterDefault))
            except RuntimeError as error:
                self._forget_error()
                self.close()
                raise RuntimeError(
                    f"the GPU registers only {start / GIB:.2f} of {num_bytes / GIB:.2f} GiB of the page store's "
                    f"region ({error}): use a smaller store_memory"
                ) from error
            self._pieces.append(address + start)
        seconds, gib = time.monotonic() - began, num_bytes / GIB
        logger.info(
            "registered %.2f GiB of the page store's region with the GPU in %.1f s, %.2f s per GiB",
            gib,
            seconds,
            seconds / gib if gib else 0.0,
        )

    def close(self) -> None:
        """Ends the registration. No copy runs."""
        while self._pieces:
            check(runtime.cudaHostUnregister(self._pieces.pop()))

    @staticmethod
    def _check_device() -> None:
        # Batched copies take the host's addresses as the device's; on WSL2 these differ, and the copies fault.
        attribute = runtime.cudaDeviceAttr.cudaDevAttrCanUseHostPointerForRegisteredMem
        if not check(runtime.cudaDeviceGetAttribute(attribute, check(runtime.cudaGetDevice()))):
            raise RuntimeError("the GPU cannot use the addresses of registered host memory: it may run under WSL2")

    @staticmethod
    def _forget_error() -> None:
        # A later check of the last error would report this one.
        runtime.cudaGetLastError()


class _Recorded:
    def __init__(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._began = began
        self._ended = ended

    def done(self) -> bool:
        return self._ended.query()

    @property
    def seconds(self) -> float:
        return self._began.elapsed_time(self._ended) / 1000


class _Direction:
    """Submits copies on a stream of its own, in a thread of its own, which waits for earlier ones."""

    def __init__(self, name: str, device: torch.device, page_bytes: int, source: int, destination: int) -> None:
        self._device = device
        self._source = source
        self._destination = destination
        # Ordered with no other stream: forward passes and copies would delay each other.
        self._stream = torch.cuda.Stream(device)
        self._copies = PageCopies(page_bytes)
        self._batch_pages = max(1, BATCH_BYTES // page_bytes)
        # Ends of submitted batches.
        self._submitted: deque[torch.cuda.Event] = deque()
        self._thread = CopyThread(name, self._copy)
        self.start = self._thread.start

    def close(self) -> None:
        """Waits for all copies."""
        self._thread.close()
        self._stream.synchronize()

    def _copy(self, sources: Sequence[int], destinations: Sequence[int]) -> RegionCopy:
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(self._device):
            began.record(self._stream)
            for start in range(0, len(sources), self._batch_pages):
                if len(self._submitted) == MAX_SUBMITTED:
                    self._submitted.popleft().synchronize()
                end = start + self._batch_pages
                self._copies.copy(
                    self._destination,
                    destinations[start:end],
                    self._source,
                    sources[start:end],
                    self._stream.cuda_stream,
                )
                # Waited for without the interpreter's lock and without spinning.
                submitted = torch.cuda.Event(blocking=True)
                submitted.record(self._stream)
                self._submitted.append(submitted)
            ended.record(self._stream)
        return _Recorded(began, ended)


class CudaRegionCopies(RegionCopies):
    """Loads need no order with forward passes: their pages enter the tree after the host has seen the copy's event, and
    only passes launched later use them. Neither do copies out: `LaunchList.num_ready` counts completed passes only."""

    def __init__(self, pool: CudaKvPool, region: np.ndarray) -> None:
        """Registers the region with the pool's GPU.

        Args:
            region: (num_slots, page_bytes) uint8, beginning at a page of the operating system.

        Raises:
            RuntimeError: the GPU refuses it.
        """
        page_bytes = pool.layout.page_bytes
        assert region.shape[1] == page_bytes and region.flags.c_contiguous
        address = region.ctypes.data
        # Keeps the mapping until the end of the registration.
        self._region: np.ndarray | None = region
        self._device = pool.device
        with torch.cuda.device(self._device):
            self._memory = RegisteredMemory(address, region.nbytes, page_bytes)
        self._out = _Direction("copy-out", self._device, page_bytes, pool.address, address)
        self._in = _Direction("copy-in", self._device, page_bytes, address, pool.address)

    def copy_out(self, page_ids: Sequence[int], slots: Sequence[int]) -> RegionCopy:
        return self._out.start(page_ids, slots)

    def copy_in(self, slots: Sequence[int], page_ids: Sequence[int]) -> RegionCopy:
        return self._in.start(slots, page_ids)

    def close(self) -> None:
        self._out.close()
        self._in.close()
        with torch.cuda.device(self._device):
            self._memory.close()
        self._region = None
