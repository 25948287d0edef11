"""Interface of transports, which move page bytes from one worker's pool to another's.

A transport has an end at each worker, opened anew for every epoch of a link. The receiver sends its *endpoint*: bytes
that only the transport writes and reads. A new transport is one file with three classes, and a line in the table.

One-sided transports write the receiver's pages from the sender; the receiver takes no part and cannot stop it.
Two-sided transports need both: the sender announces each push on the link, and the receiver expects it under the same
number.

Opening may block or fail, so it has its own thread (kvtransfer/transports/opening.py). The engine thread calls
everything else, and every call returns at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tandem.engine.kvcache.base import Completion
from tandem.engine.kvcache.pool import KvPool
from tandem.rpc.credentials import ClusterCredentials


class Completed:
    """A completion that is done."""

    def done(self) -> bool:
        return True


COMPLETED = Completed()


class SenderTransport(ABC):
    """The sending end, bound to one receiver for one epoch.

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
        """Starts copying pages from this worker's pool to the receiver's. Both lists have the same length.

        All writes to the source pages have completed, as seen by the host: a copy waits for no device work.

        Args:
            link_seq: number of this push on the link, from 0 without gaps.

        Returns:
            Done when the source pages are no longer read and, if one-sided, the destination pages are written. After a
                failure it is done although pages have not arrived: commit nothing then.
        """

    @abstractmethod
    def abort(self) -> Completion:
        """Submits nothing more. The completion means that all submitted copies are over and the receiver's memory is
        unmapped. The opening thread also calls it, for an end that is no longer wanted."""


class ReceiverTransport(ABC):
    """The receiving end for one epoch.

    Attributes:
        two_sided: whether the receiver takes part in every copy.
    """

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
        """Receives a push of `num_pages` pages; discards them if `dst_pages` is None. Called on two-sided transports
        only.

        Returns:
            Done when the pages hold the pushed data; never after a failure.
        """

    @abstractmethod
    def abort(self) -> Completion:
        """Receives nothing more. If two-sided, the completion means that nothing of this epoch can touch this worker's
        pages. If one-sided it means nothing: the receiver cannot stop the sender. The opening thread also calls it, for
        an end that is no longer wanted."""


class OneSidedReceiver(ReceiverTransport):
    """Base of one-sided receivers: provides an endpoint and takes no further part."""

    two_sided = False

    @property
    def failure(self) -> str:
        return ""

    def receive_pages(self, link_seq: int, dst_pages: Sequence[int] | None, num_pages: int) -> Completion:
        raise AssertionError("nothing is announced to a one-sided transport")

    def abort(self) -> Completion:
        return COMPLETED


class Transport(ABC):
    """One way to move pages between this worker and others. One instance for each worker.

    Attributes:
        within_host: whether both ends must be on one host. Required for one-sided transports: only on the same host can
            the exit of a dead sender be seen, which ends its writes.
    """

    within_host = False

    @abstractmethod
    def __init__(self, pool: KvPool, host: str, credentials: ClusterCredentials) -> None:
        """Checks that this worker's pool can use the transport. Opens nothing.

        Args:
            pool: this worker's pool.
            host: address to receive at, if needed.
            credentials: credentials for connections to other workers.

        Raises:
            ValueError: the pool cannot; the message names the pools that can.
        """

    @abstractmethod
    def open_sender(self, endpoint: bytes) -> SenderTransport:
        """Opens a sending end to one receiver.

        May block, but the caller gives up after `opening.OPEN_TIMEOUT_S`. Leaves nothing behind on failure.

        Raises:
            ValueError: the endpoint is invalid or does not fit this pool.
            OSError: the receiver cannot be reached this way.
        """

    @abstractmethod
    def open_receiver(self) -> ReceiverTransport:
        """Opens a receiving end for one epoch. May block like `open_sender`.

        Raises:
            ValueError, OSError: pages cannot be received this way.
        """
