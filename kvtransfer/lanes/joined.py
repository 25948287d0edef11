"""The lanes of one epoch as a single end. Copies, failures and the end are those of all lanes together."""

from collections.abc import Sequence

from tandem.engine.kvcache.base import Completion
from tandem.kvtransfer.transports.base import ReceiverTransport, SenderTransport


class AllDone:
    """Done when every part is."""

    def __init__(self, parts: Sequence[Completion]) -> None:
        self._left = list(parts)

    def done(self) -> bool:
        while self._left and self._left[-1].done():
            self._left.pop()
        return not self._left


class JoinedSender(SenderTransport):
    def __init__(self, lanes: Sequence[SenderTransport]) -> None:
        """Args: lanes: at least one, all of the same transport."""
        self._lanes = lanes
        self.two_sided = lanes[0].two_sided

    @property
    def failure(self) -> str:
        return _first_failure(self._lanes)

    def copy_pages(self, link_seq: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> Completion:
        return AllDone([lane.copy_pages(link_seq, src_pages, dst_pages) for lane in self._lanes])

    def abort(self) -> Completion:
        return AllDone([lane.abort() for lane in self._lanes])


class JoinedReceiver(ReceiverTransport):
    def __init__(self, lanes: Sequence[ReceiverTransport]) -> None:
        """Args: lanes: at least one, all of the same transport."""
        self._lanes = lanes
        self.two_sided = lanes[0].two_sided

    @property
    def failure(self) -> str:
        return _first_failure(self._lanes)

    def endpoint(self) -> bytes:
        raise AssertionError("each lane has an endpoint of its own")

    def receive_pages(self, link_seq: int, dst_pages: Sequence[int] | None, num_pages: int) -> Completion:
        return AllDone([lane.receive_pages(link_seq, dst_pages, num_pages) for lane in self._lanes])

    def abort(self) -> Completion:
        return AllDone([lane.abort() for lane in self._lanes])


def _first_failure(lanes: Sequence[SenderTransport] | Sequence[ReceiverTransport]) -> str:
    return next((failure for lane in lanes if (failure := lane.failure)), "")
