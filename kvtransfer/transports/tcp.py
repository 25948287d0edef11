"""CPU pools anywhere: pages as bytes over a TCP connection of their own. Two-sided.

The slow way, for hosts that share no memory and as the stand-in for two-sided transports on GPUs: a push and its
expect meet by number, and a thread at each end moves the bytes beside the engine thread.
"""

import contextlib
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple

from engine.kvcache.base import Completion
from engine.kvcache.pool import CpuKvPool, KvPool
from kvtransfer.transports.base import ReceiverTransport, SenderTransport, Transport

# A host that does not answer is given up after less time than an end may take to open, so that the reason is told.
CONNECT_TIMEOUT_S = 3.0
# This is longer than a sender takes to open its end once it has heard of this one.
ACCEPT_TIMEOUT_S = 30.0
# A peer that takes or gives no byte for this long is as good as gone.
STALL_TIMEOUT_S = 30.0
# A push begins with its number on the link and how many pages it has.
_HEADER = struct.Struct("!QI")
# An endpoint is the port and the token that the connection must begin with, then the host in UTF-8.
_TOKEN_BYTES = 16
_ENDPOINT = struct.Struct(f"!H{_TOKEN_BYTES}s")


class Endpoint(NamedTuple):
    """Where a receiver listens, and what a connection must begin with for it to listen on."""

    host: str
    port: int
    token: bytes

    def encode(self) -> bytes:
        return _ENDPOINT.pack(self.port, self.token) + self.host.encode()

    @staticmethod
    def decode(endpoint: bytes) -> "Endpoint":
        """Raises ValueError: these bytes are no endpoint of this transport."""
        try:
            port, token = _ENDPOINT.unpack_from(endpoint)
            host = endpoint[_ENDPOINT.size :].decode()
        except (struct.error, UnicodeDecodeError) as error:
            raise ValueError(f"{len(endpoint)} bytes that are not a TCP endpoint: {error}") from error
        if not (host and port):
            raise ValueError("the receiver told a TCP endpoint without host or port")
        return Endpoint(host, port, token)


class _Flag:
    """A completion that a mover's thread sets."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def done(self) -> bool:
        return self._event.is_set()


class _Transfer(NamedTuple):
    link_seq: int
    num_pages: int
    pages: Sequence[int] | None
    completion: _Flag


class _Mover:
    """What both ends are: a thread that works through transfers in order, until it is stopped or fails."""

    def __init__(self, pool: CpuKvPool) -> None:
        # This worker's memory is (num_pages, page_bytes) uint8.
        self._pages = pool.memory.numpy()
        self._transfers: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self._over = _Flag()
        self._failure = ""
        self._aborted = False
        self._thread = threading.Thread(target=self._main, daemon=True)

    @property
    def failure(self) -> str:
        return self._failure

    def abort(self) -> Completion:
        self._aborted = True
        self._transfers.put(None)
        self._shut()
        return self._over

    def _submit(self, link_seq: int, pages: Sequence[int] | None, num_pages: int) -> Completion:
        assert not self._aborted
        transfer = _Transfer(link_seq, num_pages, pages, _Flag())
        self._transfers.put(transfer)
        return transfer.completion

    def _main(self) -> None:
        try:
            self._meet_peer()
            while (transfer := self._transfers.get()) is not None:
                self._move(transfer)
                transfer.completion.set()
        except (OSError, ValueError) as error:
            if not self._aborted:
                self._failure = f"the page connection failed: {error}"
        finally:
            self._shut()
            self._over.set()

    def _meet_peer(self) -> None:
        """Waits for the other end, where that is not there already."""

    def _move(self, transfer: _Transfer) -> None:
        raise NotImplementedError

    def _shut(self) -> None:
        raise NotImplementedError


class _Sent:
    """A push is over when its bytes are out, or when the thread that reads the pages has ended."""

    def __init__(self, moved: Completion, over: Completion) -> None:
        self._moved = moved
        self._over = over

    def done(self) -> bool:
        return self._moved.done() or self._over.done()


class TcpSender(_Mover, SenderTransport):
    two_sided = True

    def __init__(self, pool: CpuKvPool, endpoint: bytes) -> None:
        """Connects to the receiver.

        Raises:
            ValueError: the endpoint is none of this transport's.
            OSError: the receiver cannot be reached.
        """
        super().__init__(pool)
        host, port, token = Endpoint.decode(endpoint)
        try:
            self._socket = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
        except OSError as error:
            raise OSError(f"no connection to {host}:{port}: {error}") from error
        try:
            self._socket.settimeout(STALL_TIMEOUT_S)
            self._socket.sendall(token)
        except OSError:
            self._socket.close()
            raise
        self._thread.start()

    def copy_pages(self, link_seq: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> Completion:
        assert len(src_pages) == len(dst_pages)
        return _Sent(self._submit(link_seq, src_pages, len(src_pages)), self._over)

    def _move(self, transfer: _Transfer) -> None:
        assert transfer.pages is not None
        self._socket.sendall(_HEADER.pack(transfer.link_seq, transfer.num_pages))
        for page_id in transfer.pages:
            self._socket.sendall(self._pages[page_id].data)

    def _shut(self) -> None:
        _close(self._socket)


class TcpReceiver(_Mover, ReceiverTransport):
    two_sided = True

    def __init__(self, pool: CpuKvPool, host: str) -> None:
        """Listens for one connection, from the sender that was told the token.

        Raises:
            OSError: `host` is no address of this host's.
        """
        super().__init__(pool)
        self._listener = socket.create_server((host, 0), backlog=1)
        self._listener.settimeout(ACCEPT_TIMEOUT_S)
        self._endpoint = Endpoint(host, self._listener.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES))
        self._connection: socket.socket | None = None
        self._thread.start()

    def endpoint(self) -> bytes:
        return self._endpoint.encode()

    def receive_pages(self, link_seq: int, dst_pages: Sequence[int] | None, num_pages: int) -> Completion:
        assert dst_pages is None or len(dst_pages) == num_pages
        return self._submit(link_seq, dst_pages, num_pages)

    def _meet_peer(self) -> None:
        self._connection, _ = self._listener.accept()
        self._listener.close()
        self._connection.settimeout(CONNECT_TIMEOUT_S)
        token = bytearray(_TOKEN_BYTES)
        self._read_into(memoryview(token))
        if not secrets.compare_digest(bytes(token), self._endpoint.token):
            raise ValueError("a stranger connected")
        self._connection.settimeout(STALL_TIMEOUT_S)

    def _move(self, transfer: _Transfer) -> None:
        header = bytearray(_HEADER.size)
        self._read_into(memoryview(header))
        if _HEADER.unpack(header) != (transfer.link_seq, transfer.num_pages):
            raise ValueError(f"push {_HEADER.unpack(header)} where {transfer[:2]} was announced")
        if transfer.pages is None:
            scratch = memoryview(bytearray(self._pages.shape[1]))
            for _ in range(transfer.num_pages):
                self._read_into(scratch)
        else:
            for page_id in transfer.pages:
                self._read_into(self._pages[page_id].data)

    def _read_into(self, view: memoryview) -> None:
        assert self._connection is not None
        while view.nbytes:
            # After an abort the next byte goes nowhere: the pages may be somebody else's by the time it comes.
            if self._aborted:
                raise OSError("aborted")
            num_read = self._connection.recv_into(view)
            if num_read == 0:
                raise OSError("the sender closed the connection")
            view = view[num_read:]

    def _shut(self) -> None:
        _close(self._listener)
        if self._connection is not None:
            _close(self._connection)


def _close(sock: socket.socket) -> None:
    """Closes a socket that another thread may be blocked on: shutdown wakes that thread."""
    # It fails where nothing is connected, or is closed already: nobody is blocked then.
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


class Tcp(Transport):
    def __init__(self, pool: KvPool, host: str) -> None:
        if not isinstance(pool, CpuKvPool):
            raise ValueError("transport tcp moves pages between pools in CPU memory: use nvlink on a GPU")
        self._pool = pool
        self._host = host

    def open_sender(self, endpoint: bytes) -> SenderTransport:
        return TcpSender(self._pool, endpoint)

    def open_receiver(self) -> ReceiverTransport:
        return TcpReceiver(self._pool, self._host)
