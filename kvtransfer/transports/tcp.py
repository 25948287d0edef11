"""Pages between CPU pools over a TCP connection. Two-sided.

For hosts without shared memory, and in tests for two-sided GPU transports. A thread at each end moves the bytes.
"""

import socket
import ssl

import numpy as np

from tandem.engine.kvcache.pool import CpuKvPool, KvPool
from tandem.kvtransfer.lanes.plan import Lane, lane_parts
from tandem.kvtransfer.transports import peer_socket
from tandem.kvtransfer.transports.base import ReceiverTransport, SenderTransport, Transport
from tandem.kvtransfer.transports.listener import Listener
from tandem.kvtransfer.transports.mover import HEADER, ReceivingMover, SendingMover, Transfer, check_announced
from tandem.rpc.credentials import ClusterCredentials


class TcpSender(SendingMover):
    def __init__(
        self, pool: CpuKvPool, endpoint: bytes, context: ssl.SSLContext | None = None, lane: Lane | None = None
    ) -> None:
        """Connects to the receiver. Raises ValueError for an invalid endpoint, OSError without a connection."""
        super().__init__()
        source, _ = lane_parts(pool.layout, lane)
        # (num_pages, num_pieces, piece_bytes) uint8.
        self._pages = source.view(pool.memory.numpy())
        self._connection = peer_socket.connect(endpoint, context)
        self._thread.start()

    def _meet_peer(self) -> None:
        """Connected already."""

    def _move(self, transfer: Transfer) -> None:
        assert transfer.pages is not None
        self._connection.sendall(HEADER.pack(transfer.link_seq, transfer.num_pages))
        for page_id in transfer.pages:
            self._connection.sendall(np.ascontiguousarray(self._pages[page_id]).reshape(-1).data)

    def _wake(self) -> None:
        peer_socket.wake(self._connection)

    def _close(self) -> None:
        peer_socket.close(self._connection)


class TcpReceiver(ReceivingMover):
    def __init__(
        self, pool: CpuKvPool, host: str, context: ssl.SSLContext | None = None, lane: Lane | None = None
    ) -> None:
        """Listens for the sender that shows the token. Raises OSError if `host` is not an address of this host."""
        super().__init__()
        _, destination = lane_parts(pool.layout, lane)
        self._pages = destination.view(pool.memory.numpy())
        # The pages' parts lie in one piece, and need no detour.
        self._is_whole = destination.is_whole
        self._listener = Listener(host, context)
        self._connection: socket.socket | None = None
        self._thread.start()

    def _meet_peer(self) -> None:
        self._connection = self._listener.accept()

    def _move(self, transfer: Transfer) -> None:
        header = bytearray(HEADER.size)
        self._read_into(memoryview(header))
        check_announced(header, transfer)
        scratch = np.empty(self._pages.shape[1:], np.uint8)
        for page_id in transfer.pages if transfer.pages is not None else [None] * transfer.num_pages:
            if page_id is not None and self._is_whole:
                self._read_into(self._pages[page_id].reshape(-1).data)
                continue
            self._read_into(scratch.reshape(-1).data)
            if page_id is not None:
                self._pages[page_id] = scratch

    def _read_into(self, view: memoryview) -> None:
        assert self._connection is not None
        # After an abort, write no byte: the pages may belong to another request.
        peer_socket.read_into(self._connection, view, lambda: self._aborted)

    def _wake(self) -> None:
        self._listener.wake()
        if self._connection is not None:
            peer_socket.wake(self._connection)

    def _close(self) -> None:
        self._listener.close()
        if self._connection is not None:
            peer_socket.close(self._connection)


class Tcp(Transport):
    def __init__(self, pool: KvPool, host: str, credentials: ClusterCredentials) -> None:
        if not isinstance(pool, CpuKvPool):
            raise ValueError("transport tcp moves pages between pools in CPU memory: use nvlink or nccl on a GPU")
        self._pool = pool
        self._host = host
        self._credentials = credentials

    def open_sender(self, endpoint: bytes, lane: Lane | None = None) -> SenderTransport:
        return TcpSender(self._pool, endpoint, self._credentials.context(server_side=False), lane)

    def open_receiver(self, lane: Lane | None = None) -> ReceiverTransport:
        return TcpReceiver(self._pool, self._host, self._credentials.context(server_side=True), lane)
