"""Transports whose openings and copies complete at the test's command."""

import threading
from collections.abc import Sequence

from tandem.engine.kvcache.base import Completion
from tandem.kvtransfer.lanes.plan import Lane
from tandem.kvtransfer.transports.base import ReceiverTransport, SenderTransport, Transport

# Longer than any test holds an end back.
HELD_BACK_TIMEOUT_S = 30.0


class ManualCompletion:
    def __init__(self) -> None:
        self.is_done = False

    def done(self) -> bool:
        return self.is_done


class ScriptedTransport(SenderTransport):
    """
    Attributes:
        pushes: (sequence number, source pages, destination pages) of each copy.
        copies: completions of the pushes.
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

    def copy_pages(self, link_seq: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> Completion:
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
        endpoint_error: error raised by `endpoint`; None: none.
    """

    two_sided = True

    def __init__(self) -> None:
        self.failure_reason = ""
        self.endpoint_error: Exception | None = None
        self.expected: list[tuple[int, list[int] | None, int]] = []
        self.receives: list[ManualCompletion] = []
        self.aborted = False
        self.stopped = ManualCompletion()

    @property
    def failure(self) -> str:
        return self.failure_reason

    def endpoint(self) -> bytes:
        if self.endpoint_error is not None:
            raise self.endpoint_error
        return b"scripted"

    def receive_pages(self, link_seq: int, dst_pages: Sequence[int] | None, num_pages: int) -> Completion:
        self.expected.append((link_seq, None if dst_pages is None else list(dst_pages), num_pages))
        self.receives.append(ManualCompletion())
        return self.receives[-1]

    def abort(self) -> Completion:
        self.aborted = True
        return self.stopped

    def complete_all(self) -> None:
        for receive in self.receives:
            receive.is_done = True


class ScriptedOpening(Transport):
    """A transport whose ends open at the test's command.

    Attributes:
        sender_error, receiver_error: error raised on opening that end; None: none.
        endpoint_error: error raised by an open receiver's `endpoint`; None: none.
        may_open: set (initially) while ends may open.
        num_attempts: attempts to open either end.
        senders, receivers: opened ends.
    """

    def __init__(self) -> None:
        self.sender_error: Exception | None = None
        self.receiver_error: Exception | None = None
        self.endpoint_error: Exception | None = None
        self.may_open = threading.Event()
        self.may_open.set()
        self.num_attempts = 0
        self.senders: list[ScriptedTransport] = []
        self.receivers: list[ScriptedReceiver] = []

    def open_sender(self, endpoint: bytes, lane: Lane | None = None) -> SenderTransport:
        assert endpoint == b"scripted"
        self._wait(self.sender_error)
        self.senders.append(ScriptedTransport())
        return self.senders[-1]

    def open_receiver(self, lane: Lane | None = None) -> ReceiverTransport:
        self._wait(self.receiver_error)
        self.receivers.append(ScriptedReceiver())
        self.receivers[-1].stopped.is_done = True
        self.receivers[-1].endpoint_error = self.endpoint_error
        return self.receivers[-1]

    def _wait(self, error: Exception | None) -> None:
        self.num_attempts += 1
        assert self.may_open.wait(HELD_BACK_TIMEOUT_S)
        if error is not None:
            raise error
