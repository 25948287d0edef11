"""Pages between CPU pools of one host: the sender maps the receiver's pool and copies into it. One-sided."""

import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tandem.engine.kvcache.base import Completion
from tandem.engine.kvcache.pool import CpuKvPool, KvPool, SharedPoolFile
from tandem.kvtransfer.lanes.plan import Lane, lane_parts
from tandem.kvtransfer.transports.base import (
    COMPLETED,
    OneSidedReceiver,
    ReceiverTransport,
    SenderTransport,
    Transport,
)
from tandem.rpc.credentials import ClusterCredentials

# Endpoint: process id, descriptor and size of the receiver's memfd, then its name.
_ENDPOINT = struct.Struct("!IIQ")


def encode_endpoint(file: SharedPoolFile) -> bytes:
    return _ENDPOINT.pack(file.pid, file.fd, file.num_bytes) + file.name.encode()


def decode_endpoint(endpoint: bytes) -> SharedPoolFile:
    """Raises ValueError if the bytes are not an endpoint."""
    try:
        pid, fd, num_bytes = _ENDPOINT.unpack_from(endpoint)
        return SharedPoolFile(pid, fd, endpoint[_ENDPOINT.size :].decode(), num_bytes)
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"{len(endpoint)} bytes that are not a shared memory endpoint: {error}") from error


class SharedMemorySender(SenderTransport):
    two_sided = False

    def __init__(self, pool: CpuKvPool, endpoint: bytes, lane: Lane | None = None) -> None:
        """Maps the receiver's pool. Raises ValueError if the endpoint is no local pool with pages of this size."""
        source, destination = lane_parts(pool.layout, lane)
        page_bytes = destination.page_bytes
        file = decode_endpoint(endpoint)
        if file.num_bytes == 0 or file.num_bytes % page_bytes:
            raise ValueError(f"a pool of {file.num_bytes} bytes does not consist of pages of {page_bytes} bytes")
        path = Path(f"/proc/{file.pid}/fd/{file.fd}")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ValueError(f"the receiver's pool cannot be opened from this process: {error}") from error
        try:
            # A reused process id or descriptor names another file.
            target = str(path.readlink())
            if target != f"/memfd:{file.name} (deleted)" or os.fstat(fd).st_size != file.num_bytes:
                raise ValueError(f"{path} is {target}, not the pool {file.name} of {file.num_bytes} bytes")
            mapping = mmap.mmap(fd, file.num_bytes)
        except OSError as error:
            raise ValueError(f"the receiver's pool cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        # NumPy: torch would split one page among threads, which takes longer than the copy.
        self._source = source.view(pool.memory.numpy())
        # The receiver's memory, (num_pages, num_pieces, piece_bytes) uint8; None after an abort.
        self._destination: np.ndarray | None = destination.view(
            np.frombuffer(mapping, dtype=np.uint8).reshape(-1, page_bytes)
        )

    @property
    def failure(self) -> str:
        return ""

    def copy_pages(self, link_seq: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> Completion:
        assert self._destination is not None, "a copy after abort"
        for src, dst in zip(src_pages, dst_pages, strict=True):
            self._destination[dst] = self._source[src]
        return COMPLETED

    def abort(self) -> Completion:
        self._destination = None
        return COMPLETED


class SharedMemoryReceiver(OneSidedReceiver):
    def __init__(self, pool: CpuKvPool) -> None:
        self._pool = pool

    def endpoint(self) -> bytes:
        return encode_endpoint(self._pool.file)


class SharedMemory(Transport):
    within_host = True

    def __init__(self, pool: KvPool, host: str, credentials: ClusterCredentials) -> None:
        if not isinstance(pool, CpuKvPool):
            raise ValueError("transport shared_memory moves pages between pools in CPU memory: use nvlink on a GPU")
        self._pool = pool

    def open_sender(self, endpoint: bytes, lane: Lane | None = None) -> SenderTransport:
        return SharedMemorySender(self._pool, endpoint, lane)

    def open_receiver(self, lane: Lane | None = None) -> ReceiverTransport:
        return SharedMemoryReceiver(self._pool)
