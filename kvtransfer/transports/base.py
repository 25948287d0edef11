"""Interface of transports, which move pages from one worker's pool to another's.

A transport has an end at each worker, opened anew for every epoch. Between workers of several ranks it has a pair of
ends for each lane (kvtransfer/lanes/plan.py). The receiver sends its *endpoint*, bytes that only the transport
understands. A new transport is one file with three classes, and a line in the table.

One-sided transports write the receiver's pages from the sender; the receiver cannot stop it. For two-sided ones the
sender announces each push on the link, and the receiver expects it under the same number.

Opening may block or fail and has its own thread (kvtransfer/transports/opening.py). All other calls come from the
engine thread and return at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tandem.engine.kvcache.base import Completion
from tandem.engine.kvcache.pool import KvPool
from tandem.kvtransfer.lanes.plan import Lane
from tandem.rpc.credentials import ClusterCredentials


class Completed:
    def done(self) -> bool:
        return True


COMPLETED = Completed()


class SenderTransport(ABC):
    """The sending end of one epoch.

    Attributes:
        two_sided: whether the receiver takes part in every copy.
    """

    two_sided: bool

    @property
    @abstractmethod
    def failure(self) -> str:
        """Reason to end the epoch, or ""."""

    @abstractmethod
    def copy_pages(self, link_seq: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> Completion:
        """Starts copying pages into the receiver's pool. Both lists have the same length.

        Writes to the source pages have completed: a copy waits for no device work.

        Args:
            link_seq: number of this push on the link, from 0 without gaps.

        Returns:
            Done when the source pages are no longer read and, if one-sided, the destinations are written. Also done
                after a failure, without arrival: commit nothing then.
        """

    @abstractmethod
    def abort(self) -> Completion:
        """Submits nothing more. The completion means that all copies are over and the receiver's memory is unmapped.
        The opening thread may call it too."""


class ReceiverTransport(ABC):
    """The receiving end of one epoch."""

    two_sided: bool

    @property
    @abstractmethod
    def failure(self) -> str:
        """Reason to end the epoch, or ""."""

    @abstractmethod
    def endpoint(self) -> bytes:
        """Returns the address of this end, for the sender's `Transport.open_sender`."""

    @abstractmethod
    def receive_pages(self, link_seq: int, dst_pages: Sequence[int] | None, num_pages: int) -> Completion:
        """Receives a push; discards it if `dst_pages` is None. Two-sided transports only.

        Returns:
            Done when the pages have arrived; never after a failure.
        """

    @abstractmethod
    def abort(self) -> Completion:
        """Receives nothing more. If two-sided, the completion means that the epoch cannot touch this worker's pages; if
        one-sided, nothing. The opening thread may call it too."""


class OneSidedReceiver(ReceiverTransport):
    """Base of one-sided receivers, which only provide an endpoint."""

    two_sided = False

    @property
    def failure(self) -> str:
        return ""

    def receive_pages(self, link_seq: int, dst_pages: Sequence[int] | None, num_pages: int) -> Completion:
        raise AssertionError("nothing is announced to a one-sided transport")

    def abort(self) -> Completion:
        return COMPLETED


class Transport(ABC):
    """One way to move pages, instantiated once for each worker.

    Attributes:
        within_host: whether both ends must be on one host, as for one-sided transports: only there can the exit of a
            dead sender, which ends its writes, be seen.
        between_gpus: whether both ends must be on different GPUs.
    """

    within_host = False
    between_gpus = False

    @abstractmethod
    def __init__(self, pool: KvPool, host: str, credentials: ClusterCredentials) -> None:
        """Checks that this worker's pool can use the transport. Opens nothing.

        Args:
            host: address to receive at.

        Raises:
            ValueError: it cannot; the message names the pools that can.
        """

    @abstractmethod
    def open_sender(self, endpoint: bytes, lane: Lane | None = None) -> SenderTransport:
        """Opens a sending end. May block up to `opening.OPEN_TIMEOUT_S`. Leaves nothing behind on failure.

        Args:
            lane: heads to copy, and their places in the pages of both ends; None: whole pages of equal size.

        Raises:
            ValueError: the endpoint is invalid or does not fit this pool.
            OSError: the receiver cannot be reached.
        """

    @abstractmethod
    def open_receiver(self, lane: Lane | None = None) -> ReceiverTransport:
        """Opens a receiving end, like `open_sender`. Raises ValueError or OSError."""
