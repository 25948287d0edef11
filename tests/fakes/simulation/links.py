"""Links between simulated workers: their streams and their page transports."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tandem.engine.kvcache.base import Completion
from tandem.kvtransfer.events import FromReceiver, FromSender, ReceiverLinkClosed, SenderLinkClosed
from tandem.kvtransfer.transports.base import COMPLETED, ReceiverTransport, SenderTransport
from tests.fakes.simulation.streams import END
from tests.fakes.transport import ManualCompletion

if TYPE_CHECKING:
    from tests.fakes.simulation.worker import SimWorker


def parts_of(num_bytes: int, num_lanes: int) -> list[slice]:
    """Cuts a page into a part for each lane."""
    ends = [num_bytes * lane // num_lanes for lane in range(num_lanes + 1)]
    return [slice(*one) for one in pairwise(ends)]


class SimTransport(SenderTransport):
    """Copies of one lane that run one page at a time, in any order, at the simulation's command.

    They may also run after the receiver has noticed the cut, and after the sender's death until its exit is observed.
    """

    two_sided = False

    def __init__(self, source: "SimWorker", destination: "SimWorker", part: slice) -> None:
        """Args: part: the lane's bytes of a page."""
        self.source, self.destination = source, destination
        self._part = part
        # Take the memory now: a mapping outlives its process.
        self._from, self._to = source.engine.pool.memory, destination.engine.pool.memory
        self.pending: list[tuple[int, int, ManualCompletion]] = []

    @property
    def failure(self) -> str:
        return ""

    def copy_pages(self, link_seq: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> Completion:
        self.source.check_is_computed(src_pages)
        parts = [ManualCompletion() for _ in src_pages]
        self.pending += zip(src_pages, dst_pages, parts, strict=True)
        return _AllOf(parts)

    def abort(self) -> Completion:
        return _AllOf([part for _, _, part in self.pending])

    def run(self, index: int) -> None:
        src, dst, part = self.pending.pop(index)
        if self.destination.alive:
            self.destination.check_may_be_written(dst)
        self._to[dst, self._part].copy_(self._from[src, self._part])
        part.is_done = True


class SimChannel:
    """A lane's connection of a two-sided epoch.

    The push and the expect of each sequence number meet in order and move their pages at the simulation's command.

    Attributes:
        failure: once it is broken.
    """

    def __init__(self, source: "SimWorker", destination: "SimWorker", part: slice) -> None:
        """Args: part: the lane's bytes of a page."""
        self.source, self.destination = source, destination
        self._part = part
        self.failure = ""
        self.pushes: dict[int, tuple[list[int], ManualCompletion]] = {}
        self.expects: dict[int, tuple[list[int] | None, int, ManualCompletion]] = {}
        self.next_seq = 0
        self.sender_aborted = self.receiver_aborted = False
        self.receiver_stopped = ManualCompletion()

    @property
    def can_run(self) -> bool:
        # An aborted receiver may still be in a transfer.
        return (
            self.next_seq in self.pushes
            and self.next_seq in self.expects
            and not self.sender_aborted
            and not self.failure
            and not self.receiver_stopped.is_done
            and self.source.alive
        )

    def run(self) -> None:
        if not self.can_run:
            return
        src_pages, sent = self.pushes.pop(self.next_seq)
        dst_pages, num_pages, received = self.expects.pop(self.next_seq)
        assert num_pages == len(src_pages)
        for src, dst in zip(src_pages, dst_pages or (), strict=dst_pages is not None):
            if self.destination.alive:
                self.destination.check_may_be_written(dst)
            written, read = self.destination.engine.pool.memory, self.source.engine.pool.memory
            written[dst, self._part].copy_(read[src, self._part])
        sent.is_done = received.is_done = True
        self.next_seq += 1

    def fail(self) -> None:
        """Breaks it: pushes end without arrival, and nothing more arrives."""
        self.failure = "broken"
        for _, sent in self.pushes.values():
            sent.is_done = True

    def stop_receiver(self) -> None:
        self.receiver_stopped.is_done = True


class SimTwoSidedSender(SenderTransport):
    two_sided = True

    def __init__(self, channel: SimChannel) -> None:
        self._channel = channel

    @property
    def failure(self) -> str:
        return self._channel.failure

    def copy_pages(self, link_seq: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> Completion:
        self._channel.source.check_is_computed(src_pages)
        sent = ManualCompletion()
        sent.is_done = bool(self._channel.failure)
        self._channel.pushes[link_seq] = (list(src_pages), sent)
        return sent

    def abort(self) -> Completion:
        self._channel.sender_aborted = True
        for _, sent in self._channel.pushes.values():
            sent.is_done = True
        return COMPLETED


class SimTwoSidedReceiver(ReceiverTransport):
    two_sided = True

    def __init__(self, channel: SimChannel) -> None:
        self._channel = channel

    @property
    def failure(self) -> str:
        return self._channel.failure

    def endpoint(self) -> bytes:
        return b""

    def receive_pages(self, link_seq: int, dst_pages: Sequence[int] | None, num_pages: int) -> Completion:
        received = ManualCompletion()
        self._channel.expects[link_seq] = (None if dst_pages is None else list(dst_pages), num_pages, received)
        return received

    def abort(self) -> Completion:
        self._channel.receiver_aborted = True
        return self._channel.receiver_stopped


class _AllOf:
    def __init__(self, parts: list[ManualCompletion]) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.is_done for part in self._parts)


@dataclass(eq=False)
class SimLink:
    """An epoch; each end notices its end when the END in its queue is delivered.

    Attributes:
        opening: the sender's end of the transport is opening, unknown to its engine thread.
        sender_quiet: the sender's dialer may open the next epoch.
    """

    epoch: str
    sender: "SimWorker"
    receiver: "SimWorker"
    to_sender: deque[Any] = field(default_factory=deque)
    to_receiver: deque[Any] = field(default_factory=deque)
    opening: bool = True
    sender_open: bool = False
    receiver_open: bool = True
    sender_quiet: bool = False

    def other(self, worker: "SimWorker") -> "SimWorker":
        return self.receiver if worker is self.sender else self.sender

    def queue_to(self, worker: "SimWorker") -> deque[Any]:
        return self.to_sender if worker is self.sender else self.to_receiver

    def cut(self) -> None:
        is_open_at_sender = self.opening or self.sender_open
        for queue, is_open in ((self.to_sender, is_open_at_sender), (self.to_receiver, self.receiver_open)):
            queue.clear()
            if is_open:
                queue.append(END)

    def deliver(self, worker: "SimWorker") -> None:
        if not self.queue_to(worker) or (self.opening and worker is self.sender):
            return
        message = self.queue_to(worker).popleft()
        if message is not END:
            if self.is_open_at(worker):
                is_sender = worker is self.sender
                worker.take(FromReceiver(self.epoch, message) if is_sender else FromSender(self.epoch, message))
        elif worker is self.sender and self.sender_open:
            self.sender_open = False
            worker.take(SenderLinkClosed(self.epoch, "cut", self._set_quiet))
        elif worker is self.receiver and self.receiver_open:
            self.receiver_open = False
            worker.take(ReceiverLinkClosed(self.epoch))

    def is_open_at(self, worker: "SimWorker") -> bool:
        return self.sender_open if worker is self.sender else self.receiver_open

    def _set_quiet(self) -> None:
        self.sender_quiet = True
