"""How the bytes of pages move from one worker's pool to another's."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from tandem.messages import PoolEndpoint


class Completion(Protocol):
    """Something under way."""

    def done(self) -> bool:
        """Whether it is over. Once True, always True; never blocks."""
        ...


class Completed:
    """A completion of what has already happened."""

    def done(self) -> bool:
        return True


COMPLETED = Completed()


class SenderTransport(ABC):
    """The sending end, bound to one receiver for one epoch. Used by the engine thread only."""

    @abstractmethod
    def push(self, link_seq: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> Completion:
        """Starts copying pages of this worker's pool into the receiver's; the two lists have the same length.

        Args:
            link_seq: number of this push on the link, from 0 without gaps.
        """

    @abstractmethod
    def abort(self) -> Completion:
        """Submits nothing more. The completion means that every copy submitted so far has completed and that the
        receiver's memory is let go."""


class ReceiverTransport(ABC):
    """The receiving end for one epoch."""

    @abstractmethod
    def endpoint(self) -> PoolEndpoint:
        """Tells the sender where to write."""

    @abstractmethod
    def expect(self, link_seq: int, dst_pages: Sequence[int]) -> Completion:
        """Prepares to receive a push. On a one-sided transport it says nothing about data: that is there at
        Committed."""
