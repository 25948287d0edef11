"""A transport whose copies complete when the test says so, and a recorder of link messages."""

from collections.abc import Sequence

from kvtransfer.transports.base import Completion, SenderTransport


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

    def __init__(self) -> None:
        self.pushes: list[tuple[int, list[int], list[int]]] = []
        self.copies: list[ManualCompletion] = []
        self.aborted = False

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
