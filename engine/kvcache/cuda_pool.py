import weakref
from typing import Any

import torch
from cuda.bindings import runtime

from tandem.engine.kvcache.base import PageLayout
from tandem.engine.kvcache.pool import KvPool

_PCI_ID_BYTES = 32


def check(result: tuple[Any, ...]) -> Any:
    """Returns a CUDA runtime call's values; raises RuntimeError if it failed."""
    status, *values = result
    if status != runtime.cudaError_t.cudaSuccess:
        _, name = runtime.cudaGetErrorName(status)
        _, text = runtime.cudaGetErrorString(status)
        raise RuntimeError(f"{name.decode()}: {text.decode()}")
    return values[0] if len(values) == 1 else tuple(values)


class _DeviceMemory:
    """CUDA array interface (version 3), for torch."""

    def __init__(self, address: int, num_pages: int, page_bytes: int) -> None:
        # Not freed at exit: a peer may still write, and the driver reclaims the memory.
        weakref.finalize(self, runtime.cudaFree, address).atexit = False
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_pages, page_bytes),
            "typestr": "|u1",
            "version": 3,
        }


class CudaKvPool(KvPool):
    """Pages in one plain cudaMalloc allocation, (num_pages + 1, page_bytes) with the dummy page: an IPC handle of
    torch's allocator names a whole segment."""

    def __init__(self, layout: PageLayout, num_pages: int, device: torch.device) -> None:
        """Allocates zeroed pages.

        Raises:
            RuntimeError: the pool exceeds the device's free memory.
        """
        num_bytes = (num_pages + 1) * layout.page_bytes
        with torch.cuda.device(device):
            address = check(runtime.cudaMalloc(num_bytes))
            owner = _DeviceMemory(address, num_pages + 1, layout.page_bytes)
            check(runtime.cudaMemset(address, 0, num_bytes))
            self.ipc_handle = bytes(check(runtime.cudaIpcGetMemHandle(address)).reserved)
        memory_and_dummy = torch.as_tensor(owner, device=device)
        super().__init__(layout, num_pages, memory_and_dummy[:num_pages])
        self.memory_and_dummy = memory_and_dummy
        self.address = address
        pci_id = bytes(check(runtime.cudaDeviceGetPCIBusId(_PCI_ID_BYTES, self.device.index)))
        self.gpu = pci_id.partition(b"\0")[0].decode()

    def close(self) -> None:
        """Does nothing: the memory is freed with its last tensor."""
