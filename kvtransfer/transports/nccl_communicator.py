"""NCCL communicator of two ranks, called through cupy.

While a communicator is made and connected, NCCL waits forever for a stalled peer, and nothing can interrupt it. So this
runs on its own thread, which is abandoned if it takes too long. In non-blocking mode NCCL would start a thread for
every piece of pages, which takes as long as sending 30 MiB.
"""

import os
import threading
from typing import Any

import torch

from tandem.hosts import interface_of

# Ranks in a communicator.
SENDER, RECEIVER = 0, 1


def load_nccl(host: str) -> Any:
    """Imports NCCL's module with settings for this use.

    Args:
        host: address at which this worker receives.

    Raises:
        ValueError: cupy is missing.
    """
    # NCCL reads these once in a process. Two ranks need no multicast. Use the interface of all other traffic: loopback
    # on one host.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if interface := interface_of(host):
        # "=" selects this very interface, not all names with this prefix.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise ValueError(f"NCCL is called through cupy, which is missing or has none: {error}") from error
    return nccl


class Communicator:
    """A communicator owned by one thread. No call waits for the other end. Every call raises RuntimeError if NCCL
    reports a failure."""

    def __init__(self, nccl: Any, rank: int, unique_id: bytes, device: torch.device) -> None:
        """Starts to make the communicator, together with the other end.

        Args:
            nccl: result of `load_nccl`.
            rank: SENDER or RECEIVER.
            unique_id: id shared with the other end.
        """
        self._nccl = nccl
        self._rank = rank
        self._device = device
        self._communicator: Any = None
        # A first message connects the two ends. That is slow, and no request's pages should wait for it.
        self._message = torch.empty(1, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device)
        self._arrived = torch.cuda.Event()
        self._error: Exception | None = None
        # Guards the owner of the communicator: the connecting thread, until it is made or abandoned.
        self._lock = threading.Lock()
        self._is_made = False
        self._is_abandoned = False
        threading.Thread(target=self._make, args=(unique_id,), name="connect-nccl", daemon=True).start()

    def is_connected(self) -> bool:
        """Returns whether `transmit` may be called."""
        # Check the error last: it is set before _is_made. If the message failed, its event was never recorded, and CUDA
        # reports such an event as done.
        is_connected = self._is_made and self._arrived.query()
        if self._error is not None:
            raise RuntimeError(f"no communicator could be made: {self._error}") from self._error
        return is_connected

    def check(self) -> None:
        """Raises RuntimeError if anything has failed."""
        if self._is_made:
            self._communicator.check_async_error()

    def transmit(self, address: int, num_bytes: int, stream: torch.cuda.Stream) -> None:
        """Sends from or receives into device memory, in the stream's order."""
        post = self._communicator.send if self._rank == SENDER else self._communicator.recv
        post(address, num_bytes, self._nccl.NCCL_UINT8, 1 - self._rank, stream.cuda_stream)

    def abort(self) -> None:
        """Ends the communicator and its device work, whatever the other end does."""
        with self._lock:
            self._is_abandoned = True
            if not self._is_made:
                # The connecting thread owns it and ends it when NCCL returns, at the latest after the end of a peer
                # that it has met. Only the first message can move until then.
                return
        self._communicator.abort()

    def _make(self, unique_id: bytes) -> None:
        try:
            with torch.cuda.device(self._device):
                self._communicator = self._nccl.NcclCommunicator(2, unique_id, self._rank)
                if self._is_abandoned:
                    raise RuntimeError("nobody waits for it any more")
                self.transmit(self._message.data_ptr(), 1, self._stream)
                self._arrived.record(self._stream)
        except Exception as error:
            self._error = error
        with self._lock:
            self._is_made = self._communicator is not None
            if not (self._is_made and self._is_abandoned):
                return
        self._communicator.abort()
