"""What a transport is: one way for the bytes of pages to move from one worker's pool to another's.

A transport has two ends, one at each worker, opened anew for every epoch of a link. Where the sender finds the
receiving end is told as an *endpoint*: bytes that the transport writes and reads itself, and nobody else understands.
So a new transport is one file with its three classes, and its line in the table.

One-sided transports write the receiver's pages from the sender; the receiver takes no part and can stop nobody.
Two-sided ones need both: the sender announces each push on the link, and the receiver expects it under the same number.

Opening may take time and may fail, so it has a thread of its own (kvtransfer/transports/opening.py). Everything else is
called by the engine thread and returns at once: a decode step waits for nothing here.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tandem.engine.kvcache.base import Completion
from tandem.engine.kvcache.pool import KvPool
from tandem.rpc.credentials import ClusterCredentials


class Completed:
    """A completion of what has already happened."""

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
        """Why the epoch must end, or ""."""

    @abstractmethod
    def copy_pages(self, link_seq: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> Completion:
        """Starts copying pages of this worker's pool into the receiver's; the two lists have the same length.

        Whatever wrote the source pages has completed, and the host has seen that: a copy waits for nothing that the
        device has yet to do.

        Args:
            link_seq: number of this push on the link, from 0 without gaps.

        Returns:
            Done when the source pages are no longer read and, one-sided, the destination pages are written. After a
            failure it is done without the pages having arrived: nothing may be committed then.
        """

    @abstractmethod
    def abort(self) -> Completion:
        """Submits nothing more. The completion means that every copy submitted so far is over and that the receiver's
        memory is let go. Also called by the thread that opened this end, if nobody wants it any more."""


class ReceiverTransport(ABC):
    """The receiving end for one epoch.

    Attributes:
        two_sided: as at the sender.
    """

    two_sided: bool

    @property
    @abstractmethod
    def failure(self) -> str:
        """Why the epoch must end, or ""."""

    @abstractmethod
    def endpoint(self) -> bytes:
        """Tells the sender where this end is: what `Transport.open_sender` of the other worker is given."""

    @abstractmethod
    def receive_pages(self, link_seq: int, dst_pages: Sequence[int] | None, num_pages: int) -> Completion:
        """Receives a push of `num_pages` pages; `dst_pages` None reads it and throws it away. Called on a two-sided
        transport alone.

        Returns:
            Done when the pages hold what was pushed, and never after a failure.
        """

    @abstractmethod
    def abort(self) -> Completion:
        """Receives nothing more. On a two-sided transport the completion means that nothing of this epoch can touch
        this worker's pages any more; on a one-sided one it means nothing, for the receiver can stop nobody. Also called
        by the thread that opened this end, if nobody wants it any more."""


class OneSidedReceiver(ReceiverTransport):
    """Tells the sender where to write, and takes no further part."""

    two_sided = False

    @property
    def failure(self) -> str:
        return ""

    def receive_pages(self, link_seq: int, dst_pages: Sequence[int] | None, num_pages: int) -> Completion:
        raise AssertionError("nothing is announced to a one-sided transport")

    def abort(self) -> Completion:
        return COMPLETED


class Transport(ABC):
    """One way for pages to travel between this worker and others. It is what the table names, and made once for each
    worker.

    Attributes:
        within_host: whether both ends must be on one host. A one-sided transport's have to be: only there is a sender
            that has died seen to have exited, and nothing else says that it writes no page any more.
    """

    within_host = False

    @abstractmethod
    def __init__(self, pool: KvPool, host: str, credentials: ClusterCredentials) -> None:
        """Looks whether this worker's pool can travel this way; opens nothing yet.

        Args:
            pool: this worker's, which pages are sent from or received into.
            host: the address to receive at, where that takes an address.
            credentials: for connections to and from other workers.

        Raises:
            ValueError: it cannot; the message says which pools can.
        """

    @abstractmethod
    def open_sender(self, endpoint: bytes) -> SenderTransport:
        """Binds to one receiver, at the endpoint that it told.

        It may block, but not for long: the caller stops waiting after `opening.OPEN_TIMEOUT_S`. It leaves nothing
        behind when it fails.

        Raises:
            ValueError: the endpoint is none of this transport's, or not one that this pool can send to.
            OSError: the receiver cannot be reached this way.
        """

    @abstractmethod
    def open_receiver(self) -> ReceiverTransport:
        """Opens a receiving end for one epoch. The same holds for it as for `open_sender`.

        Raises:
            ValueError, OSError: pages cannot be received this way.
        """
