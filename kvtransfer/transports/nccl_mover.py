"""What both ends of an NCCL transport are: a thread that has a communicator, its streams and a ring of slots to itself.
Imported on CUDA machines alone."""

import queue
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from engine.kvcache.base import Completion
from engine.kvcache.batched_copies import PageCopies
from engine.kvcache.cuda_pool import CudaKvPool
from kvtransfer.transports import peer_socket
from kvtransfer.transports.mover import Flag, Mover, Transfer

# Larger pieces are little faster, smaller ones are slower: 16 MiB have 0.84 of the speed.
SLOT_BYTES = 64 * 2**20
# One is filled, one travels, one is emptied.
NUM_SLOTS = 3
# So many transfers are under way at most.
MAX_PENDING = 8
# What is under way is looked at so often.
POLL_S = 0.00005
# Whether the peer is there is looked at so often meanwhile.
PEER_POLL_S = 0.01
# A transfer that takes longer comes to nothing any more.
STALL_TIMEOUT_S = 30.0
# The making of a communicator may take so long; OPEN_TIMEOUT_S is a little longer.
CONNECT_TIMEOUT_S = 4.5
# Ranks in a communicator.
SENDER, RECEIVER = 0, 1


class _Ring:
    """Slots for pieces of pages, in turns."""

    def __init__(self, page_bytes: int, device: torch.device) -> None:
        self.num_pages = max(1, SLOT_BYTES // page_bytes)
        self._slots = torch.empty((NUM_SLOTS, self.num_pages * page_bytes), dtype=torch.uint8, device=device)
        self._free = [torch.cuda.Event() for _ in range(NUM_SLOTS)]
        self._next = 0

    def take(self, stream: torch.cuda.Stream) -> tuple[int, torch.cuda.Event]:
        """The next slot's address, which this stream may write once what was there is not needed any more; and the
        event to record when that is so again."""
        number = self._next
        self._next = (number + 1) % NUM_SLOTS
        stream.wait_event(self._free[number])
        return self._slots[number].data_ptr(), self._free[number]


class _Pending:
    """A transfer that the device has, with the event behind the last of it.

    Attributes:
        since: when it was submitted, or became the oldest.
    """

    __slots__ = ("completion", "event", "since")

    def __init__(self, event: torch.cuda.Event, completion: Flag) -> None:
        self.event = event
        self.completion = completion
        self.since = time.monotonic()


class _Quiet:
    """An end that has been aborted touches no page any more: its thread has ended, or never came to move any."""

    def __init__(self, mover: "NcclMover") -> None:
        self._mover = mover

    def done(self) -> bool:
        return self._mover.is_quiet()


class NcclMover(Mover):
    """An end. NCCL and its streams belong to its thread."""

    def __init__(self, pool: CudaKvPool, rank: int) -> None:
        """
        Raises:
            ValueError: cupy is missing.
            RuntimeError: the slots do not fit into the device's memory.
        """
        super().__init__()
        self._nccl = _load_nccl()
        self._pool = pool
        self._page_bytes = pool.layout.page_bytes
        self._rank = rank
        self._ring = _Ring(self._page_bytes, pool.device)
        # One stream has what NCCL does, the other one copies within the device: a piece is gathered while the one
        # before it travels.
        self._network, self._local = torch.cuda.Stream(pool.device), torch.cuda.Stream(pool.device)
        self._copies = PageCopies(self._page_bytes)
        self._connection: socket.socket | None = None
        self._communicator: Any = None
        self._moves = False
        self._pending: deque[_Pending] = deque()
        self._peer_looked_at = 0.0

    def abort(self) -> Completion:
        super().abort()
        return _Quiet(self)

    def is_quiet(self) -> bool:
        # The thread looks whether it is aborted after it has set this: one of the two sees the other. Nothing ends the
        # making of a communicator but the other end's process.
        return self._over.done() or (self._aborted and not self._moves)

    def _main(self) -> None:
        with torch.cuda.device(self._pool.device):
            super()._main()

    def _join(self, connection: socket.socket, unique_id: bytes) -> None:
        """Makes the communicator, together with the other end."""
        connection.setblocking(False)
        self._communicator = self._nccl.NcclCommunicator(2, unique_id, self._rank)
        # With the first message the two connect. That takes long: no request's pages should wait for it.
        address, _ = self._ring.take(self._network)
        self._transmit(address, 1)
        connected = torch.cuda.Event()
        connected.record(self._network)
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while not connected.query():
            self._check_going_on(deadline)
            time.sleep(POLL_S)
        self._communicator.check_async_error()

    def _work(self) -> None:
        self._moves = True
        while True:
            self._settle()
            try:
                transfer = self._transfers.get(timeout=POLL_S if self._pending else None)
            except queue.Empty:
                continue
            if transfer is None or self._aborted:
                return
            self._move(transfer)
            while len(self._pending) >= MAX_PENDING:
                time.sleep(POLL_S)
                self._settle()

    def _settle(self) -> None:
        """Completes the transfers that are over. Raises OSError or RuntimeError: nothing more can move."""
        while self._pending and self._pending[0].event.query():
            # What aborts a communicator ends its kernels too, with nothing done.
            self._communicator.check_async_error()
            self._pending.popleft().completion.set()
            if self._pending:
                self._pending[0].since = time.monotonic()
        if self._pending:
            self._check_going_on(self._pending[0].since + STALL_TIMEOUT_S)

    def _check_going_on(self, deadline: float) -> None:
        """Raises OSError or RuntimeError if what is waited for will never come."""
        now = time.monotonic()
        if self._aborted:
            raise OSError("aborted")
        if now > deadline:
            raise OSError("the other end takes no part")
        if now >= self._peer_looked_at + PEER_POLL_S:
            self._peer_looked_at = now
            if self._communicator is not None:
                self._communicator.check_async_error()
            assert self._connection is not None
            if _peek(self._connection) == b"":
                raise OSError("the other end closed the connection")

    def _read(self, num_bytes: int) -> bytes:
        """What the other end says next; transfers are completed meanwhile. Raises as `_settle`."""
        assert self._connection is not None
        deadline = time.monotonic() + STALL_TIMEOUT_S
        said = b""
        while True:
            if _peek(self._connection):
                said += self._connection.recv(num_bytes - len(said))
                if len(said) == num_bytes:
                    return said
            self._settle()
            self._check_going_on(deadline)
            time.sleep(POLL_S)

    def _transmit(self, address: int, num_bytes: int) -> None:
        """Has NCCL send what is there, or receive to there."""
        post = self._communicator.send if self._rank == SENDER else self._communicator.recv
        post(address, num_bytes, self._nccl.NCCL_UINT8, 1 - self._rank, self._network.cuda_stream)

    def _pieces(self, pages: Sequence[int]) -> Iterator[list[int]]:
        rest = iter(pages)
        while piece := list(islice(rest, self._ring.num_pages)):
            yield piece

    def _submitted(self, stream: torch.cuda.Stream, transfer: Transfer) -> None:
        """The device has all of a transfer, the last of it on this stream."""
        event = torch.cuda.Event()
        event.record(stream)
        self._pending.append(_Pending(event, transfer.completion))

    def _wake(self) -> None:
        """The thread blocks on nothing for long."""

    def _close(self) -> None:
        # The other end hears of it first: its kernels wait for ours.
        if self._connection is not None:
            peer_socket.close(self._connection)
        if self._communicator is not None:
            self._communicator.abort()
        self._network.synchronize()
        self._local.synchronize()


def _load_nccl() -> Any:
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise ValueError(f"NCCL is called through cupy, which is missing or has none: {error}") from error
    return nccl


def _peek(connection: socket.socket) -> bytes | None:
    """The next byte, which stays; b"" at the end; None if nothing has come. Raises OSError: the connection broke."""
    try:
        return connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return None
