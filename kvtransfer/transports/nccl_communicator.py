"""NCCL communicator of two ranks, called through cupy.

While a communicator is made, NCCL waits forever for a stalled peer. So this runs on its own thread, abandoned after a
timeout. In non-blocking mode NCCL would start a thread for every piece of pages, which takes as long as sending 30 MiB.
"""

import os
import threading
from typing import Any

import torch

from tandem.hosts import interface_of

SENDER, RECEIVER = 0, 1


def load_nccl(host: str) -> Any:
    """Imports NCCL's module. Raises ValueError if cupy is missing.

    Args:
        host: address at which this worker receives.
    """
    # Read once in a process. Two ranks need no multicast; use the interface of all other traffic.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if interface := interface_of(host):
        # "=" selects this very interface, not all names with this prefix.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise ValueError(f"transport nccl needs cupy with NCCL: {error}") from error
    return nccl


class Communicator:
    """A communicator of one thread, whose calls never wait for the other end and raise RuntimeError on any NCCL
    failure."""

    def __init__(self, nccl: Any, rank: int, unique_id: bytes, device: torch.device) -> None:
        """Starts to make it. Args: rank: SENDER or RECEIVER; unique_id: shared with the other end."""
        self._nccl = nccl
        self._rank = rank
        self._device = device
        self._communicator: Any = None
        # A first, slow message connects the ends, so that no request's pages wait for it.
        self._message = torch.empty(1, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device)
        self._arrived = torch.cuda.Event()
        self._error: Exception | None = None
        # Guards the owner: the connecting thread, until made or abandoned.
        self._lock = threading.Lock()
        self._is_made = False
        self._is_abandoned = False
        threading.Thread(target=self._make, args=(unique_id,), name="connect-nccl", daemon=True).start()

    def is_connected(self) -> bool:
        """Returns whether `transmit` may be called."""
        # Check the error last: it is set before _is_made. CUDA reports an event that was never recorded as done.
        is_connected = self._is_made and self._arrived.query()
        if self._error is not None:
            raise RuntimeError(f"no communicator could be made: {self._error}") from self._error
        return is_connected

    def check(self) -> None:
        if self._is_made:
            self._communicator.check_async_error()

    def transmit(self, address: int, num_bytes: int, stream: torch.cuda.Stream) -> None:
        """Sends or receives device memory, in the stream's order."""
        post = self._communicator.send if self._rank == SENDER else self._communicator.recv
        post(address, num_bytes, self._nccl.NCCL_UINT8, 1 - self._rank, stream.cuda_stream)

    def abort(self) -> None:
        with self._lock:
            self._is_abandoned = True
            if not self._is_made:
                # The connecting thread ends it when NCCL returns, at the latest when a peer that it has met ends. Until
                # then only the first message can move.
                return
        self._communicator.abort()

    def _make(self, unique_id: bytes) -> None:
        try:
            with torch.cuda.device(self._device):
                self._communicator = self._nccl.NcclCommunicator(2, unique_id, self._rank)
                if self._is_abandoned:
                    raise RuntimeError("abandoned while it was being made")
                self.transmit(self._message.data_ptr(), 1, self._stream)
                self._arrived.record(self._stream)
        except Exception as error:
            self._error = error
        with self._lock:
            self._is_made = self._communicator is not None
            if not (self._is_made and self._is_abandoned):
                return
        self._communicator.abort()
