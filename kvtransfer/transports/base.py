"""How the bytes of pages move from one worker's pool to another's.

One-sided transports write the receiver's pages from the sender; the receiver takes no part and can stop nobody.
Two-sided ones need both: the sender announces each push on the link, and the receiver expects it under the same number.
All methods are called by the engine thread and return at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from engine.kvcache.base import Completion
from engine.kvcache.pool import KvPool
from tandem.messages import PoolEndpoint


class Completed:
    """A completion of what has already happened."""

    def done(self) -> bool:
        return True


COMPLETED = Completed()


class SenderTransport(ABC):
    """The sending end, bound to one receiver for one epoch."""

    two_sided: bool

    @property
    @abstractmethod
    def failure(self) -> str:
        """Why the epoch must end, or ""."""

    @abstractmethod
    def push(self, link_seq: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> Completion:
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
        memory is let go."""


class ReceiverTransport(ABC):
    """The receiving end for one epoch."""

    two_sided: bool

    @property
    @abstractmethod
    def failure(self) -> str:
        """Why the epoch must end, or ""."""

    @abstractmethod
    def endpoint(self) -> PoolEndpoint:
        """Tells the sender where to write."""

    @abstractmethod
    def expect(self, link_seq: int, dst_pages: Sequence[int] | None, num_pages: int) -> Completion:
        """Receives a push of `num_pages` pages; `dst_pages` None reads it and throws it away.

        On a one-sided transport it says nothing about data: that is there at Committed. On a two-sided one it is done
        when the pages hold what was pushed, and never after a failure.
        """

    @abstractmethod
    def abort(self) -> Completion:
        """Receives nothing more. On a two-sided transport the completion means that nothing of this epoch can touch
        this worker's pages any more; on a one-sided one it means nothing, for the receiver can stop nobody."""


class Transport(ABC):
    """One way for pages to travel, between this worker and others. What the table names; made once for each worker."""

    def __init__(self, pool: KvPool, host: str) -> None:
        """Args: host: the address to receive at, where that takes an address."""
        self._pool = pool
        self._host = host

    @abstractmethod
    def open_sender(self, endpoint: PoolEndpoint) -> SenderTransport:
        """Binds to one receiver, which said where to write.

        Raises:
            ValueError: it cannot be reached this way.
        """

    @abstractmethod
    def open_receiver(self) -> ReceiverTransport:
        """A receiving end for one epoch."""


class OneSidedReceiver(ReceiverTransport):
    """Tells the sender where to write, and takes no further part."""

    two_sided = False

    @property
    def failure(self) -> str:
        return ""

    def expect(self, link_seq: int, dst_pages: Sequence[int] | None, num_pages: int) -> Completion:
        return COMPLETED

    def abort(self) -> Completion:
        return COMPLETED
