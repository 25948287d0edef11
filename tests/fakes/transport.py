"""Transports whose copies complete when the test says so."""

from collections.abc import Sequence

from engine.kvcache.base import Completion
from kvtransfer.transports.base import ReceiverTransport, SenderTransport
from tandem.messages import PoolEndpoint


class ManualCompletion:
    def __init__(self) -> None:
        self.is_done = False

    def done(self) -> bool:
        return self.is_done


class ScriptedTransport(SenderTransport):
    """
    Attributes:
        pushes: (sequence number, source pages, destination pages) of each push.
        copies: their completions.
    """

    def __init__(self, two_sided: bool = False) -> None:
        self.two_sided = two_sided
        self.failure_reason = ""
        self.pushes: list[tuple[int, list[int], list[int]]] = []
        self.copies: list[ManualCompletion] = []
        self.aborted = False

    @property
    def failure(self) -> str:
        return self.failure_reason

    def push(self, link_seq: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> Completion:
        assert not self.aborted
        self.pushes.append((link_seq, list(src_pages), list(dst_pages)))
        self.copies.append(ManualCompletion())
        return self.copies[-1]

    def abort(self) -> Completion:
        self.aborted = True
        return _All(self.copies)

    def complete_all(self) -> None:
        for copy in self.copies:
            copy.is_done = True


class _All:
    def __init__(self, parts: Sequence[ManualCompletion]) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)


class ScriptedReceiver(ReceiverTransport):
    """A two-sided receiver.

    Attributes:
        expected: (sequence number, destination pages, number of pages) of each announced push.
        stopped: the completion of `abort`.
    """

    two_sided = True

    def __init__(self) -> None:
        self.failure_reason = ""
        self.expected: list[tuple[int, list[int] | None, int]] = []
        self.receives: list[ManualCompletion] = []
        self.aborted = False
        self.stopped = ManualCompletion()

    @property
    def failure(self) -> str:
        return self.failure_reason

    def endpoint(self) -> PoolEndpoint:
        return PoolEndpoint(0, 0, "scripted", 0)

    def expect(self, link_seq: int, dst_pages: Sequence[int] | None, num_pages: int) -> Completion:
        self.expected.append((link_seq, None if dst_pages is None else list(dst_pages), num_pages))
        self.receives.append(ManualCompletion())
        return self.receives[-1]

    def abort(self) -> Completion:
        self.aborted = True
        return self.stopped

    def complete_all(self) -> None:
        for receive in self.receives:
            receive.is_done = True
