"""Numbered reports of prefixes, from a worker or a page store."""

from abc import ABC, abstractmethod

from tandem.messages import CachedPrefixes


class PrefixReport(ABC):
    """What one life of a sender has reported, usually 0.1 s old.

    Attributes:
        num_messages: number of possible changes.
    """

    __slots__ = ("_is_in_order", "_next_number", "num_messages")

    def __init__(self) -> None:
        self.num_messages = 0
        self._next_number = 0
        self._is_in_order = True

    def receive(self, message: CachedPrefixes) -> bool:
        """Applies a message. Returns False if an earlier one is missing: the caller then asks the sender to repeat
        everything. Raises ValueError for malformed identities."""
        if message.is_whole:
            self.clear()
            self._is_in_order = True
        elif not self._is_in_order:
            return True
        elif message.number != self._next_number:
            self._is_in_order = False
            return False
        self._next_number = message.number + 1
        self.num_messages += 1
        self._apply(message)
        return True

    @abstractmethod
    def clear(self) -> None:
        """Forgets all prefixes."""

    @abstractmethod
    def _apply(self, message: CachedPrefixes) -> None:
        """Removes and adds the identities of a message."""
