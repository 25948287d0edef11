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
from engine.kvcache.pool import KvPool
from kvtransfer.transports.base import ReceiverTransport, SenderTransport, Transport
from tandem.messages import PoolEndpoint

CONNECT_TIMEOUT_S = 5.0
# The sender opens its end when its engine thread gets to it, which may be busy with a forward.
ACCEPT_TIMEOUT_S = 60.0
# A peer that takes or gives no byte for this long is as good as gone.
STALL_TIMEOUT_S = 30.0
_HEADER = struct.Struct("!QI")  # link_seq, num_pages
_TOKEN_BYTES = 16


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

    def __init__(self, pool: KvPool) -> None:
        # (num_pages, page_bytes) uint8 of this worker.
        self._pages = pool.page_bytes_view.numpy()
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
            self._open()
            while (transfer := self._transfers.get()) is not None:
                self._move(transfer)
                transfer.completion.set()
        except (OSError, ValueError) as error:
            if not self._aborted:
                self._failure = f"the page connection failed: {error}"
        finally:
            self._shut()
            self._over.set()

    def _open(self) -> None:
        raise NotImplementedError

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

    def __init__(self, pool: KvPool, endpoint: PoolEndpoint) -> None:
        """Begins to connect to the receiver; that it cannot be reached is a `failure`."""
        super().__init__(pool)
        self._endpoint = endpoint
        self._socket = socket.socket()
        self._thread.start()

    def push(self, link_seq: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> Completion:
        assert len(src_pages) == len(dst_pages)
        return _Sent(self._submit(link_seq, src_pages, len(src_pages)), self._over)

    def _open(self) -> None:
        host, _, port = self._endpoint.address.rpartition(":")
        self._socket.settimeout(CONNECT_TIMEOUT_S)
        self._socket.connect((host, int(port)))
        self._socket.settimeout(STALL_TIMEOUT_S)
        self._socket.sendall(bytes.fromhex(self._endpoint.name))

    def _move(self, transfer: _Transfer) -> None:
        assert transfer.pages is not None
        self._socket.sendall(_HEADER.pack(transfer.link_seq, transfer.num_pages))
        for page_id in transfer.pages:
            self._socket.sendall(self._pages[page_id].data)

    def _shut(self) -> None:
        _close(self._socket)


class TcpReceiver(_Mover, ReceiverTransport):
    two_sided = True

    def __init__(self, pool: KvPool, host: str) -> None:
        """Listens for one connection, from the sender that was told the token."""
        super().__init__(pool)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener = socket.create_server((host, 0), backlog=1)
        self._listener.settimeout(ACCEPT_TIMEOUT_S)
        self._host = host
        self._num_bytes = pool.page_bytes_view.nbytes
        self._connection: socket.socket | None = None
        self._port = self._listener.getsockname()[1]
        self._thread.start()

    def endpoint(self) -> PoolEndpoint:
        return PoolEndpoint(0, 0, self._token.hex(), self._num_bytes, f"{self._host}:{self._port}")

    def expect(self, link_seq: int, dst_pages: Sequence[int] | None, num_pages: int) -> Completion:
        assert dst_pages is None or len(dst_pages) == num_pages
        return self._submit(link_seq, dst_pages, num_pages)

    def _open(self) -> None:
        self._connection, _ = self._listener.accept()
        self._listener.close()
        self._connection.settimeout(CONNECT_TIMEOUT_S)
        token = bytearray(_TOKEN_BYTES)
        self._read_into(memoryview(token))
        if not secrets.compare_digest(bytes(token), self._token):
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
    # Not connected, or closed already: nobody is blocked then.
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


class Tcp(Transport):
    def open_sender(self, endpoint: PoolEndpoint) -> SenderTransport:
        return TcpSender(self._pool, endpoint)

    def open_receiver(self) -> ReceiverTransport:
        return TcpReceiver(self._pool, self._host)
