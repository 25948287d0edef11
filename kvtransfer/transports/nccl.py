"""GPUs that NCCL connects: over NVLink, PCIe, InfiniBand or sockets, on one host or between hosts. Two-sided. Imported
on CUDA machines alone; NCCL is called through cupy.

Each epoch of a link has a communicator of two, and at either end one thread has it for itself. Pages travel in pieces
of many, because sends of single pages have a fraction of a link's speed: the sender gathers a piece into a slot of a
ring, and the receiver scatters it from one of its own, while the next piece is on its way.

Beside the communicator the ends have a TCP connection. A push begins there with its number, and NCCL is given it when
both ends have come to it: a kernel that waits for the other end keeps multiprocessors from the model. The connection
also tells of a peer's end, at which the communicator is aborted, because NCCL itself would wait for ever.
"""

import logging
import ssl
import time

from tandem.engine.kvcache.cuda_pool import CudaKvPool
from tandem.engine.kvcache.pool import KvPool
from tandem.kvtransfer.transports import peer_socket
from tandem.kvtransfer.transports.base import ReceiverTransport, SenderTransport, Transport
from tandem.kvtransfer.transports.mover import HEADER, Flag, ReceivingMover, SendingMover, Transfer, check_announced
from tandem.kvtransfer.transports.nccl_communicator import RECEIVER, SENDER
from tandem.kvtransfer.transports.nccl_mover import CONNECT_TIMEOUT_S, PEER_POLL_S, NcclMover
from tandem.kvtransfer.transports.peer_socket import Endpoint
from tandem.rpc.credentials import ClusterCredentials

logger = logging.getLogger(__name__)

_UNIQUE_ID_BYTES = 128
# The sender's word that it has the unique id, and is about to join.
_JOINING = b"j"


class NcclSender(NcclMover, SendingMover):
    def __init__(self, pool: CudaKvPool, host: str, endpoint: bytes, context: ssl.SSLContext | None = None) -> None:
        """Connects to the receiver, over TCP and by NCCL.

        Args:
            context: for TLS on the TCP connection; None: plain.

        Raises:
            ValueError: the endpoint is none of this transport's, or cupy is missing.
            OSError: the receiver cannot be reached.
            RuntimeError: the slots do not fit into the device's memory.
        """
        super().__init__(pool, host, SENDER)
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
    def __init__(self, pool: CudaKvPool, host: str, context: ssl.SSLContext | None = None) -> None:
        """Listens for one connection, from the sender that was told the token.

        Args:
            context: for TLS on the TCP connection; None: plain.

        Raises:
            ValueError: cupy is missing.
            OSError: `host` is no address of this host's.
            RuntimeError: the slots do not fit into the device's memory.
        """
        super().__init__(pool, host, RECEIVER)
        self._listener = peer_socket.Listener(host, context)
        self._thread.start()

    def _meet_peer(self) -> None:
        self._connection = self._listener.accept()
        self._connection.setblocking(False)
        unique_id = self._nccl.get_unique_id()
        self._connection.sendall(unique_id)
        # NCCL waits for ever for one that never begins to join, and has nobody tell it that there is none.
        self._read(len(_JOINING), CONNECT_TIMEOUT_S)
        self._join(unique_id)

    def _move(self, transfer: Transfer) -> None:
        assert self._connection is not None
        # The sender waits for the same words, and does not wait for its own to come back.
        self._connection.sendall(HEADER.pack(transfer.link_seq, transfer.num_pages))
        check_announced(self._read(HEADER.size), transfer)
        # What is thrown away takes the same way, up to the slot.
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
    def __init__(self, pool: KvPool, host: str, credentials: ClusterCredentials) -> None:
        if not isinstance(pool, CudaKvPool):
            raise ValueError("transport nccl moves pages between pools on GPUs: use shared_memory or tcp on a CPU")
        self._pool = pool
        self._host = host
        self._credentials = credentials
        self._has_warned = False

    def open_sender(self, endpoint: bytes) -> SenderTransport:
        if self._credentials.secure and not self._has_warned and Endpoint.decode(endpoint).host != self._host:
            self._has_warned = True
            logger.warning(
                "transport nccl sends KV pages to other hosts in the clear, in spite of the cluster's TLS: NCCL's own "
                "connections have none, so the network between the hosts must be encrypted"
            )
        return NcclSender(self._pool, self._host, endpoint, self._credentials.context(server_side=False))

    def open_receiver(self) -> ReceiverTransport:
        return NcclReceiver(self._pool, self._host, self._credentials.context(server_side=True))
