"""Pages between GPUs over NCCL, within or across hosts. Two-sided. Imported on CUDA machines only.

Each lane of an epoch has a communicator of two, owned by one thread at each end. Single pages reach only a fraction of
a link's speed, so pages travel in pieces: the sender gathers a piece into a slot of a ring and the receiver scatters it
from its own, while the next one travels.

A push is announced on a TCP connection and goes to NCCL only when both ends have reached it: a waiting kernel takes
multiprocessors from the model. When the connection shows a peer's end, the communicator is aborted, because NCCL itself
would wait forever.
"""

import logging
import ssl
import time

from tandem.engine.kvcache.cuda_pool import CudaKvPool
from tandem.engine.kvcache.pool import KvPool
from tandem.kvtransfer.lanes.plan import Lane
from tandem.kvtransfer.transports import peer_socket
from tandem.kvtransfer.transports.base import ReceiverTransport, SenderTransport, Transport
from tandem.kvtransfer.transports.listener import Listener
from tandem.kvtransfer.transports.mover import HEADER, Flag, ReceivingMover, SendingMover, Transfer, check_announced
from tandem.kvtransfer.transports.nccl_communicator import RECEIVER, SENDER
from tandem.kvtransfer.transports.nccl_mover import CONNECT_TIMEOUT_S, PEER_POLL_S, NcclMover
from tandem.kvtransfer.transports.peer_socket import Endpoint
from tandem.rpc.credentials import ClusterCredentials

logger = logging.getLogger(__name__)

_UNIQUE_ID_BYTES = 128
_JOINING = b"j"


class NcclSender(NcclMover, SendingMover):
    def __init__(
        self,
        pool: CudaKvPool,
        host: str,
        endpoint: bytes,
        context: ssl.SSLContext | None = None,
        lane: Lane | None = None,
    ) -> None:
        """Connects to the receiver over TCP and NCCL.

        Raises:
            ValueError: the endpoint is invalid, or cupy is missing.
            OSError: the receiver cannot be reached.
            RuntimeError: the slots do not fit into device memory.
        """
        super().__init__(pool, host, SENDER, lane)
        self._connected = Flag()
        self._connection = peer_socket.connect(endpoint, context)
        self._connection.setblocking(False)
        self._thread.start()
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while not (self._connected.done() or self._over.done()):
            if time.monotonic() > deadline:
                self.abort()
                raise OSError(f"NCCL did not connect within {CONNECT_TIMEOUT_S:g} s")
            time.sleep(PEER_POLL_S)
        if self._failure:
            raise OSError(self._failure)

    def _meet_peer(self) -> None:
        assert self._connection is not None
        unique_id = self._read(_UNIQUE_ID_BYTES, CONNECT_TIMEOUT_S)
        self._connection.sendall(_JOINING)
        self._join(unique_id)
        self._connected.set()

    def _move(self, transfer: Transfer) -> None:
        assert self._connection is not None and transfer.pages is not None
        header = HEADER.pack(transfer.link_seq, transfer.num_pages)
        self._connection.sendall(header)
        is_expected = False
        for piece in self._pieces(transfer.pages):
            slot, free = self._slots.take(self._local)
            self._copies.copy(slot, range(len(piece)), self._pool.address, piece, self._local.cuda_stream)
            self._network.wait_stream(self._local)
            if not is_expected:
                if (answer := self._read(HEADER.size)) != header:
                    raise ValueError(f"push {transfer[:2]} where the other end has {HEADER.unpack(answer)}")
                is_expected = True
            self._transmit(slot, len(piece) * self._page_bytes)
            free.record(self._network)
        self._submitted(self._network, transfer)


class NcclReceiver(NcclMover, ReceivingMover):
    def __init__(
        self, pool: CudaKvPool, host: str, context: ssl.SSLContext | None = None, lane: Lane | None = None
    ) -> None:
        """Listens for the sender that shows the token.

        Raises:
            ValueError: cupy is missing.
            OSError: `host` is not an address of this host.
            RuntimeError: the slots do not fit into device memory.
        """
        super().__init__(pool, host, RECEIVER, lane)
        self._listener = Listener(host, context)
        self._thread.start()

    def _meet_peer(self) -> None:
        self._connection = self._listener.accept()
        self._connection.setblocking(False)
        unique_id = self._nccl.get_unique_id()
        self._connection.sendall(unique_id)
        # NCCL would wait forever for a sender that never begins to join.
        self._read(len(_JOINING), CONNECT_TIMEOUT_S)
        self._join(unique_id)

    def _move(self, transfer: Transfer) -> None:
        assert self._connection is not None
        # The sender waits for this; the receiver does not wait for the sender.
        self._connection.sendall(HEADER.pack(transfer.link_seq, transfer.num_pages))
        check_announced(self._read(HEADER.size), transfer)
        # Discarded pages are received into slots too.
        pages = transfer.pages if transfer.pages is not None else range(transfer.num_pages)
        for piece in self._pieces(pages):
            slot, free = self._slots.take(self._network)
            self._transmit(slot, len(piece) * self._page_bytes)
            self._local.wait_stream(self._network)
            if transfer.pages is not None:
                self._copies.copy(self._pool.address, piece, slot, range(len(piece)), self._local.cuda_stream)
            free.record(self._local)
        self._submitted(self._local, transfer)

    def _wake(self) -> None:
        self._listener.wake()

    def _close(self) -> None:
        self._listener.close()
        super()._close()


class Nccl(Transport):
    # NCCL refuses two ranks on one GPU.
    between_gpus = True

    def __init__(self, pool: KvPool, host: str, credentials: ClusterCredentials) -> None:
        if not isinstance(pool, CudaKvPool):
            raise ValueError("transport nccl moves pages between pools on GPUs: use shared_memory or tcp on a CPU")
        self._pool = pool
        self._host = host
        self._credentials = credentials
        self._has_warned = False

    def open_sender(self, endpoint: bytes, lane: Lane | None = None) -> SenderTransport:
        if self._credentials.secure and not self._has_warned and Endpoint.decode(endpoint).host != self._host:
            self._has_warned = True
            logger.warning(
                "transport nccl sends KV pages to other hosts in the clear, despite the cluster's TLS: NCCL's own "
                "connections have none, so the network between the hosts must be encrypted"
            )
        return NcclSender(self._pool, self._host, endpoint, self._credentials.context(server_side=False), lane)

    def open_receiver(self, lane: Lane | None = None) -> ReceiverTransport:
        return NcclReceiver(self._pool, self._host, self._credentials.context(server_side=True), lane)
