"""Device memory that all ranks of a worker map, and a word of host memory that their devices watch. Needs CUDA."""

import mmap

import torch
from cuda.bindings import runtime

from tandem.engine.kvcache.cuda_pool import check
from tandem.engine.ranks.group import RankGroup


class IpcMemory:
    """An allocation of each rank, zeroed, mapped by all ranks over CUDA IPC. Their devices may be one.

    Attributes:
        addresses: of the ranks' allocations in this process, by rank.
        abort_address: of the word that ends waits, for the device.
    """

    def __init__(self, group: RankGroup, num_bytes: int, device: torch.device) -> None:
        """Every rank calls it.

        Raises:
            ValueError: on every rank, a device cannot map another's memory.
        """
        assert group.progress is not None
        self._rank = group.ranks.rank
        self._device = device
        self.addresses: tuple[int, ...] = ()
        with torch.cuda.device(device):
            self._own = int(check(runtime.cudaMalloc(num_bytes)))
            check(runtime.cudaMemset(self._own, 0, num_bytes))
            # The others may write as soon as they have the handle.
            check(runtime.cudaDeviceSynchronize())
            handles = group.gathered(bytes(check(runtime.cudaIpcGetMemHandle(self._own)).reserved))
            mapped, error = [], ""
            try:
                for rank, handle in enumerate(handles):
                    mapped.append(self._own if rank == self._rank else _mapped(handle))
            except RuntimeError as failure:
                error = str(failure)
            for rank, text in enumerate(group.gathered(error)):
                if text:
                    raise ValueError(
                        f"rank {rank} cannot map another rank's GPU memory ({text}): its GPU needs peer "
                        "access to the others"
                    )
            self.addresses = tuple(mapped)
            self._word = group.progress.abort_address
            assert self._word % mmap.PAGESIZE == 0
            check(runtime.cudaHostRegister(self._word, mmap.PAGESIZE, runtime.cudaHostRegisterMapped))
            self.abort_address = int(check(runtime.cudaHostGetDevicePointer(self._word, 0)))

    def close(self) -> None:
        """This rank's operations have ended. Its own allocation stays: other ranks may still map it."""
        torch.cuda.synchronize(self._device)
        with torch.cuda.device(self._device):
            for rank, address in enumerate(self.addresses):
                if rank != self._rank:
                    check(runtime.cudaIpcCloseMemHandle(address))
            check(runtime.cudaHostUnregister(self._word))


def _mapped(handle: bytes) -> int:
    of_peer = runtime.cudaIpcMemHandle_t()
    of_peer.reserved = handle
    return int(check(runtime.cudaIpcOpenMemHandle(of_peer, runtime.cudaIpcMemLazyEnablePeerAccess)))
