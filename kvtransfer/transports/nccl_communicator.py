"""NCCL's communicator of two, called through cupy.

NCCL waits for ever for a peer that stands still while a communicator is made and connected, and nobody can end what
blocks there. So that happens on a thread of its own, which is left alone with it if it takes too long. Told not to
block, NCCL would start a thread for every piece of pages, which takes as long as a piece of 30 MiB travels.
"""

import os
import threading
from typing import Any

import torch

from tandem.hosts import interface_of

# Ranks in a communicator.
SENDER, RECEIVER = 0, 1


def load_nccl(host: str) -> Any:
    """Imports NCCL's module, with its settings for our use.

    Args:
        host: the address that this worker receives at.

    Raises:
        ValueError: cupy is missing.
    """
    # NCCL reads these once in a process. Two ends have no use for multicast, and what the workers say to each other
    # goes over the interface that all else goes over: on one host that is loopback.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if interface := interface_of(host):
        # The "=" asks for this very one, and not for all whose names begin so.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise ValueError(f"NCCL is called through cupy, which is missing or has none: {error}") from error
    return nccl


class Communicator:
    """It belongs to one thread, whom no call makes wait for the other end. Every call raises RuntimeError if NCCL says
    that something has failed."""

    def __init__(self, nccl: Any, rank: int, unique_id: bytes, device: torch.device) -> None:
        """Begins to make it, together with the other end, which has the same id.

        Args:
            nccl: of `load_nccl`.
            rank: SENDER or RECEIVER.
        """
        self._nccl = nccl
        self._rank = rank
        self._device = device
        self._communicator: Any = None
        # The first message, with which the two connect: it takes long, and no request's pages should wait for it.
        self._message = torch.empty(1, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device)
        self._arrived = torch.cuda.Event()
        self._error: Exception | None = None
        # Guards which thread has the communicator: the connecting one as long as it is neither made nor abandoned.
        self._lock = threading.Lock()
        self._is_made = False
        self._is_abandoned = False
        threading.Thread(target=self._make, args=(unique_id,), name="connect-nccl", daemon=True).start()

    def is_connected(self) -> bool:
        """Nothing may be transmitted before."""
        # An error is set before it counts as made, and is asked for after that: a message that could not be sent has an
        # event that was never recorded, which has happened by CUDA's account.
        is_connected = self._is_made and self._arrived.query()
        if self._error is not None:
            raise RuntimeError(f"no communicator could be made: {self._error}") from self._error
        return is_connected

    def check(self) -> None:
        """Looks whether anything has failed."""
        if self._is_made:
            self._communicator.check_async_error()

    def transmit(self, address: int, num_bytes: int, stream: torch.cuda.Stream) -> None:
        """Has the device send what is there, or receive to there, in the stream's order."""
        post = self._communicator.send if self._rank == SENDER else self._communicator.recv
        post(address, num_bytes, self._nccl.NCCL_UINT8, 1 - self._rank, stream.cuda_stream)

    def abort(self) -> None:
        """Ends what was begun, and what the device does for it, whatever the other end does."""
        with self._lock:
            self._is_abandoned = True
            if not self._is_made:
                # NCCL has the connecting thread, which ends it all as soon as it is let go, when a peer that it has met
                # has ended at the latest. Until then nothing but that message can move.
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
