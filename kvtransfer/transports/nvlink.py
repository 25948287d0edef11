"""Pages between peer GPUs of one host: copy engines, or a kernel that copies some heads, write the receiver's mapped
pool. One-sided. Imported on CUDA machines only."""

import struct
from collections.abc import Sequence

import torch
from cuda.bindings import runtime

from tandem.engine.kvcache.base import Completion
from tandem.engine.kvcache.batched_copies import PageCopies, copies_between
from tandem.engine.kvcache.cuda_pool import CudaKvPool, check
from tandem.engine.kvcache.pool import KvPool
from tandem.kvtransfer.lanes.plan import Lane, lane_parts
from tandem.kvtransfer.transports.base import OneSidedReceiver, ReceiverTransport, SenderTransport, Transport
from tandem.rpc.credentials import ClusterCredentials

# Pages in a push's first batch; each further batch has twice as many.
FIRST_PAGES = 4
# For the kernel that copies heads: the model's kernels would hold all multiprocessors.
HIGH_PRIORITY = -1

# Endpoint: size of the pool in bytes, and its CUDA IPC handle.
_ENDPOINT = struct.Struct("!Q64s")


def encode_endpoint(pool: CudaKvPool) -> bytes:
    return _ENDPOINT.pack(pool.num_pages * pool.layout.page_bytes, pool.ipc_handle)


def decode_endpoint(endpoint: bytes) -> tuple[int, bytes]:
    """Raises ValueError if the endpoint is invalid."""
    try:
        num_bytes, handle = _ENDPOINT.unpack(endpoint)
    except struct.error as error:
        raise ValueError(f"{len(endpoint)} bytes that are not an NVLink endpoint: {error}") from error
    return num_bytes, handle


class _Copied:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event.query()


class NvlinkSender(SenderTransport):
    two_sided = False

    def __init__(self, pool: CudaKvPool, endpoint: bytes, lane: Lane | None = None) -> None:
        """Maps the receiver's pool. Raises ValueError if the endpoint is no pool of this host's GPUs with pages of this
        size."""
        source, destination = lane_parts(pool.layout, lane)
        page_bytes = destination.page_bytes
        num_bytes, ipc_handle = decode_endpoint(endpoint)
        if num_bytes == 0 or num_bytes % page_bytes:
            raise ValueError(f"a pool of {num_bytes} bytes does not consist of pages of {page_bytes} bytes")
        self._num_dst_pages = num_bytes // page_bytes
        self._src = pool.address
        self._device = pool.device
        self._copies = copies_between(source, destination, self._device)
        # Ordered with no other stream: a forward launched already would delay the pages.
        self._stream = torch.cuda.Stream(self._device, priority=0 if self._copies_whole_pages else HIGH_PRIORITY)
        handle = runtime.cudaIpcMemHandle_t()
        try:
            handle.reserved = ipc_handle
            # This is not the engine thread: set the device.
            with torch.cuda.device(self._device):
                self._dst = int(check(runtime.cudaIpcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)))
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"the receiver's pool cannot be mapped: {error}") from error
        self._last: Completion | None = None
        self._aborted = False

    @property
    def failure(self) -> str:
        return ""

    @property
    def _copies_whole_pages(self) -> bool:
        return isinstance(self._copies, PageCopies)

    def copy_pages(self, link_seq: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> Completion:
        assert not self._aborted, "a copy after abort"
        assert len(src_pages) == len(dst_pages) and max(dst_pages) < self._num_dst_pages
        # Submitting whole pages takes half as long as copying: start with few and submit the rest meanwhile.
        start, num_pages = 0, FIRST_PAGES if self._copies_whole_pages else len(src_pages)
        while start < len(src_pages):
            end = start + num_pages
            self._copies.copy(
                self._dst, dst_pages[start:end], self._src, src_pages[start:end], self._stream.cuda_stream
            )
            start, num_pages = end, 2 * num_pages
        copied = torch.cuda.Event()
        copied.record(self._stream)
        self._last = _Copied(copied)
        return self._last

    def abort(self) -> Completion:
        self._aborted = True
        return _Unmapping(self._dst, self._device, self._last)


class _Unmapping:
    """Unmaps the receiver's pool after the last copy: a mapping keeps a dead receiver's memory."""

    def __init__(self, address: int, device: torch.device, last: Completion | None) -> None:
        self._address = address
        self._device = device
        self._last = last
        self._done = False

    def done(self) -> bool:
        if not self._done and (self._last is None or self._last.done()):
            with torch.cuda.device(self._device):
                check(runtime.cudaIpcCloseMemHandle(self._address))
            self._done = True
        return self._done


class NvlinkReceiver(OneSidedReceiver):
    def __init__(self, pool: CudaKvPool) -> None:
        self._pool = pool

    def endpoint(self) -> bytes:
        return encode_endpoint(self._pool)


class Nvlink(Transport):
    within_host = True

    def __init__(self, pool: KvPool, host: str, credentials: ClusterCredentials) -> None:
        if not isinstance(pool, CudaKvPool):
            raise ValueError("transport nvlink moves pages between pools on GPUs: use shared_memory or tcp on a CPU")
        self._pool = pool

    def open_sender(self, endpoint: bytes, lane: Lane | None = None) -> SenderTransport:
        return NvlinkSender(self._pool, endpoint, lane)

    def open_receiver(self, lane: Lane | None = None) -> ReceiverTransport:
        return NvlinkReceiver(self._pool)
