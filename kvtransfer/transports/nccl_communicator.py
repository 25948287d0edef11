"""NCCL's communicator of two, called through cupy, of which no call waits for the other end.

NCCL by itself waits for ever for a peer that has died or stands still, also in the calls that make and connect a
communicator, and nobody can end what blocks there. So it is told not to block: such a call begins something, says with
an error that it is in progress, and whether it is ready is asked for.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

# Ranks in a communicator.
SENDER, RECEIVER = 0, 1
# NCCL's ncclInProgress.
_IN_PROGRESS = 7


def load_nccl(host: str) -> Any:
    """Imports NCCL's module, with its settings for our use.

    Args:
        host: the address that this worker receives at.

    Raises:
        ValueError: cupy is missing.
    """
    # NCCL reads these once in a process. Two ends have no use for multicast, and what the workers of one host say to
    # each other stays on it.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if host == "127.0.0.1":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # This one is no choice: cupy can set it in no other way, and without it a peer's death may cost a thread.
    os.environ["NCCL_COMM_BLOCKING"] = "0"
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise ValueError(f"NCCL is called through cupy, which is missing or has none: {error}") from error
    return nccl


class Communicator:
    """It belongs to one thread. Every call raises RuntimeError if NCCL says that something has failed."""

    def __init__(self, nccl: Any, rank: int) -> None:
        """Args: nccl: of `load_nccl`; rank: SENDER or RECEIVER."""
        self._nccl = nccl
        self._rank = rank
        # It is initialized later: of one whose initialization raises nothing would be left to ask or to abort.
        self._communicator = nccl.NcclCommunicator.__new__(nccl.NcclCommunicator)

    def begin(self, unique_id: bytes) -> None:
        """Begins to make it, together with the other end, which has the same id."""
        self._is_over(lambda: self._communicator.__init__(2, unique_id, self._rank))

    def is_ready(self) -> bool:
        """Whether what was begun last is over; until then nothing else may be begun, nor a stream be relied on."""
        return self._is_over(self._communicator.check_async_error)

    def transmit(self, address: int, num_bytes: int, stream: torch.cuda.Stream) -> bool:
        """Has the device send what is there, or receive to there, in the stream's order; returns as `is_ready`."""
        post = self._communicator.send if self._rank == SENDER else self._communicator.recv
        return self._is_over(
            lambda: post(address, num_bytes, self._nccl.NCCL_UINT8, 1 - self._rank, stream.cuda_stream)
        )

    def abort(self) -> None:
        """Ends what was begun, and what the device does for it, whatever the other end does."""
        self._communicator.abort()

    def _is_over(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except self._nccl.NcclError as error:
            if error.status != _IN_PROGRESS:
                raise
            return False
        except KeyError as error:
            # cupy 14 looks up what a status is called, and has nothing for this one.
            if error.args != (_IN_PROGRESS,):
                raise
            return False
        return True
