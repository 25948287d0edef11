"""CPU pools of one host: the sender maps the receiver's pool and copies pages into it. One-sided, synchronous."""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.kvcache.base import Completion
from engine.kvcache.pool import CpuKvPool
from kvtransfer.transports.base import COMPLETED, OneSidedReceiver, ReceiverTransport, SenderTransport, Transport
from tandem.messages import PoolEndpoint


class SharedMemorySender(SenderTransport):
    two_sided = False

    def __init__(self, pool: CpuKvPool, endpoint: PoolEndpoint) -> None:
        """Maps the receiver's pool.

        Raises:
            ValueError: the endpoint is not a pool of this host with pages of this size.
        """
        page_bytes = pool.layout.page_bytes
        if endpoint.num_bytes == 0 or endpoint.num_bytes % page_bytes:
            raise ValueError(f"a pool of {endpoint.num_bytes} bytes does not consist of pages of {page_bytes} bytes")
        path = Path(f"/proc/{endpoint.pid}/fd/{endpoint.fd}")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ValueError(f"the receiver's pool cannot be opened from this process: {error}") from error
        try:
            # A process number or descriptor that has been reused names something else.
            target = str(path.readlink())
            if target != f"/memfd:{endpoint.name} (deleted)" or os.fstat(fd).st_size != endpoint.num_bytes:
                raise ValueError(f"{path} is {target}, not the pool {endpoint.name} of {endpoint.num_bytes} bytes")
            mapping = mmap.mmap(fd, endpoint.num_bytes)
        except OSError as error:
            raise ValueError(f"the receiver's pool cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        # In numpy: torch would share the copy of one page among its threads, and their meeting takes longer than it.
        self._source = pool.page_bytes_view.numpy()
        # (num_pages, page_bytes) of the receiver; None once aborted.
        self._destination: np.ndarray | None = np.frombuffer(mapping, dtype=np.uint8).reshape(-1, page_bytes)

    @property
    def failure(self) -> str:
        return ""

    def push(self, link_seq: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> Completion:
        assert self._destination is not None, "push after abort"
        for src, dst in zip(src_pages, dst_pages, strict=True):
            self._destination[dst] = self._source[src]
        return COMPLETED

    def abort(self) -> Completion:
        self._destination = None
        return COMPLETED


class SharedMemoryReceiver(OneSidedReceiver):
    def __init__(self, pool: CpuKvPool) -> None:
        self._pool = pool

    def endpoint(self) -> PoolEndpoint:
        return PoolEndpoint(*self._pool.file)


class SharedMemory(Transport):
    def open_sender(self, endpoint: PoolEndpoint) -> SenderTransport:
        return SharedMemorySender(self._pool, endpoint)  # type: ignore[arg-type]

    def open_receiver(self) -> ReceiverTransport:
        return SharedMemoryReceiver(self._pool)  # type: ignore[arg-type]
