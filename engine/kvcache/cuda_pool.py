"""A pool in the memory of a CUDA device. Imported where there is one, and nowhere else."""

import weakref
from typing import Any

import torch
from cuda.bindings import runtime

from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.pool import KvPool


def check(result: tuple[Any, ...]) -> Any:
    """What a CUDA runtime call returned, without its status.

    Raises:
        RuntimeError: the call failed.
    """
    status, *values = result
    if status != runtime.cudaError_t.cudaSuccess:
        _, name = runtime.cudaGetErrorName(status)
        _, text = runtime.cudaGetErrorString(status)
        raise RuntimeError(f"{name.decode()}: {text.decode()}")
    return values[0] if len(values) == 1 else tuple(values)


class _DeviceMemory:
    """What torch needs to see memory that is not its own: the CUDA array interface, version 3. Every tensor made of it
    refers to it; the memory is freed with the last."""

    def __init__(self, address: int, num_pages: int, page_bytes: int) -> None:
        # At the process's end nothing is freed: a peer may still write then, and the driver takes the memory anyway.
        weakref.finalize(self, runtime.cudaFree, address).atexit = False
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_pages, page_bytes),
            "typestr": "|u1",
            "version": 3,
        }


class CudaKvPool(KvPool):
    """Pages in one plain cudaMalloc allocation: an IPC handle of torch's own allocator would name a whole segment.

    Attributes:
        ipc_handle: what another process of this host opens the pool with.
        address: of the first page, on the device.
        memory_and_dummy: `memory` and one page after it, the dummy page, which belongs to nobody: rows of padding read
            and write there. (num_pages + 1, page_bytes) uint8.
    """

    def __init__(self, layout: PageLayout, num_pages: int, device: torch.device) -> None:
        """Allocates zeroed pages; tandem.engine.kvcache.sizing says how many fit.

        Raises:
            RuntimeError: the pool does not fit into the device's free memory.
        """
        num_bytes = (num_pages + 1) * layout.page_bytes
        with torch.cuda.device(device):
            address = check(runtime.cudaMalloc(num_bytes))
            owner = _DeviceMemory(address, num_pages + 1, layout.page_bytes)
            check(runtime.cudaMemset(address, 0, num_bytes))
            self.ipc_handle = bytes(check(runtime.cudaIpcGetMemHandle(address)).reserved)
        self.memory_and_dummy = torch.as_tensor(owner, device=device)
        super().__init__(layout, num_pages, self.memory_and_dummy[:num_pages])
        self.address = address

    def close(self) -> None:
        """The memory goes with the last tensor that refers to it."""
