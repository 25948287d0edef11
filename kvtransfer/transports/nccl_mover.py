"""Base of both ends of the NCCL transport. Imported on CUDA machines only."""

import logging
import queue
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch

from tandem.engine.kvcache.base import Completion
from tandem.engine.kvcache.batched_copies import copies_between
from tandem.engine.kvcache.cuda_pool import CudaKvPool
from tandem.kvtransfer.lanes.plan import Lane, lane_parts
from tandem.kvtransfer.transports import peer_socket
from tandem.kvtransfer.transports.mover import Flag, Mover, Transfer
from tandem.kvtransfer.transports.nccl_communicator import SENDER, Communicator, load_nccl
from tandem.timer_slack import sleep_exactly

logger = logging.getLogger(__name__)

# A piece takes NCCL up to 0.1 ms to start, half of the travel time of 64 MiB.
SLOT_BYTES = 128 * 2**20
# One slot is filled, one travels, one is emptied.
NUM_SLOTS = 3
# Maximum number of transfers in flight.
MAX_PENDING = 8
# Poll interval, in seconds.
POLL_S = 0.00002
PEER_POLL_S = 0.01
STALL_TIMEOUT_S = 30.0
# Below OPEN_TIMEOUT_S.
CONNECT_TIMEOUT_S = 4.5
CONNECT_POLL_S = 0.001
ABORT_TIMEOUT_S = 30.0
# Maximum time counted between two checks: a stalled process has not waited.
ABORT_LOOK_S = 0.5


class _Ring:
    def __init__(self, num_pages: int, page_bytes: int, device: torch.device) -> None:
        """Args: num_pages: of a slot; page_bytes: of each page in it."""
        self.num_pages = num_pages
        self._slots = torch.empty((NUM_SLOTS, num_pages * page_bytes), dtype=torch.uint8, device=device)
        self._free = [torch.cuda.Event() for _ in range(NUM_SLOTS)]
        self._next = 0

    def take(self, stream: torch.cuda.Stream) -> tuple[int, torch.cuda.Event]:
        """Returns a slot's address, writable once its last use has ended, and the event to record after the new use."""
        number = self._next
        self._next = (number + 1) % NUM_SLOTS
        stream.wait_event(self._free[number])
        return self._slots[number].data_ptr(), self._free[number]


class _Pending:
    """A transfer on the device. Attributes: since: time at which it was submitted or became the oldest."""

    __slots__ = ("completion", "event", "since")

    def __init__(self, event: torch.cuda.Event, completion: Flag) -> None:
        self.event = event
        self.completion = completion
        self.since = time.monotonic()


class _Quiet:
    """Done when an aborted end touches no pages: its thread has ended or never moved any.

    If it never is, the pages are lost: `done` raises RuntimeError, which ends the engine thread and so the process.
    """

    def __init__(self, mover: "NcclMover", clock: Callable[[], float] = time.monotonic) -> None:
        self._mover = mover
        self._clock = clock
        self._looked_at = clock()
        self._waited_s = 0.0

    def done(self) -> bool:
        if self._mover.is_quiet():
            return True
        now = self._clock()
        self._waited_s += min(now - self._looked_at, ABORT_LOOK_S)
        self._looked_at = now
        if self._waited_s > ABORT_TIMEOUT_S:
            raise RuntimeError(f"an aborted NCCL transport did not end within {ABORT_TIMEOUT_S:g} s")
        return False


class NcclMover(Mover):
    """A thread that owns a communicator, its streams and a ring of slots."""

    def __init__(self, pool: CudaKvPool, host: str, rank: int, lane: Lane | None) -> None:
        """
        Args:
            rank: SENDER or RECEIVER.

        Raises:
            ValueError: cupy is missing.
            RuntimeError: the slots do not fit into device memory.
        """
        super().__init__()
        self._nccl = load_nccl(host)
        self._pool = pool
        source, destination = lane_parts(pool.layout, lane)
        # Of a page's part, as it travels.
        self._page_bytes = source.num_bytes
        self._rank = rank
        # Both ends cut the same pieces. The slots of a rank's lanes together are about as large as those of one lane.
        num_pages = max(1, SLOT_BYTES // max(source.page_bytes, destination.page_bytes))
        self._ring: _Ring | None = _Ring(num_pages, self._page_bytes, pool.device)
        # For NCCL and for copies within the device: a piece is gathered while the previous one travels.
        self._network, self._local = torch.cuda.Stream(pool.device), torch.cuda.Stream(pool.device)
        if rank == SENDER:
            self._copies = copies_between(source, source.packed(), pool.device)
        else:
            self._copies = copies_between(destination.packed(), destination, pool.device)
        self._connection: socket.socket | None = None
        self._communicator: Communicator | None = None
        self._moves = False
        self._pending: deque[_Pending] = deque()
        self._peer_looked_at = 0.0

    def abort(self) -> Completion:
        super().abort()
        return _Quiet(self)

    def is_quiet(self) -> bool:
        # The thread sets _moves before it checks _aborted: one of the two sees the other.
        return self._over.done() or (self._aborted and not self._moves)

    def _main(self) -> None:
        sleep_exactly()
        with torch.cuda.device(self._pool.device):
            super()._main()

    def _join(self, unique_id: bytes) -> None:
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        self._communicator = Communicator(self._nccl, self._rank, unique_id, self._pool.device)
        while not self._communicator.is_connected():
            self._check_going_on(deadline)
            time.sleep(CONNECT_POLL_S)

    @property
    def _slots(self) -> _Ring:
        assert self._ring is not None
        return self._ring

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
        """Completes finished transfers. Raises OSError or RuntimeError if nothing more can move."""
        while self._pending and self._pending[0].event.query():
            # A failed communicator ends its kernels without having moved data.
            assert self._communicator is not None
            self._communicator.check()
            self._pending.popleft().completion.set()
            if self._pending:
                self._pending[0].since = time.monotonic()
        if self._pending:
            self._check_going_on(self._pending[0].since + STALL_TIMEOUT_S)

    def _check_going_on(self, deadline: float) -> None:
        now = time.monotonic()
        if self._aborted:
            raise OSError("aborted")
        if now > deadline:
            raise OSError("the other end did not respond in time")
        if now >= self._peer_looked_at + PEER_POLL_S:
            self._peer_looked_at = now
            if self._communicator is not None:
                self._communicator.check()
            assert self._connection is not None
            if peer_socket.has_ended(self._connection):
                raise OSError("the other end closed the connection")

    def _read(self, num_bytes: int, timeout_s: float = STALL_TIMEOUT_S) -> bytes:
        """Completes transfers while it waits for bytes. Raises like `_settle`."""
        assert self._connection is not None
        deadline = time.monotonic() + timeout_s
        said = b""
        while True:
            if peer_socket.has_come(self._connection):
                said += peer_socket.take(self._connection, num_bytes - len(said))
                if len(said) == num_bytes:
                    return said
            self._settle()
            self._check_going_on(deadline)
            if self._pending:
                time.sleep(POLL_S)
            else:
                peer_socket.wait_readable([self._connection], time.monotonic() + PEER_POLL_S)

    def _transmit(self, address: int, num_bytes: int) -> None:
        assert self._communicator is not None
        self._communicator.transmit(address, num_bytes, self._network)

    def _pieces(self, pages: Sequence[int]) -> Iterator[list[int]]:
        rest = iter(pages)
        while piece := list(islice(rest, self._slots.num_pages)):
            yield piece

    def _submitted(self, stream: torch.cuda.Stream, transfer: Transfer) -> None:
        """Records a transfer's end, on the stream of its last operation."""
        event = torch.cuda.Event()
        event.record(stream)
        self._pending.append(_Pending(event, transfer.completion))

    def _wake(self) -> None:
        """The thread never blocks for long."""

    def _close(self) -> None:
        # Tell the other end first: its kernels wait for ours.
        if self._connection is not None:
            peer_socket.close(self._connection)
        if self._communicator is not None:
            try:
                self._communicator.abort()
            except RuntimeError:
                # The streams tell whether anything runs.
                logger.exception("a communicator could not be aborted")
        self._network.synchronize()
        self._local.synchronize()
        # Free the memory even if this object lives on.
        self._ring = None
