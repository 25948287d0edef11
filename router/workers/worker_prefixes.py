"""Prefixes that a worker reports as cached."""

from tandem.messages import CachedPrefixes
from tandem.prefix import unpack_identities


class WorkerPrefixes:
    """Cached prefixes of one life of a worker, usually 0.1 s old. With a prefix it has all shorter ones, except while
    the worker repeats its whole report.

    Attributes:
        identities: identities of prefixes that end with a page (tandem.prefix).
        num_messages: number of possible changes.
    """

    __slots__ = ("_is_in_order", "_next_number", "identities", "num_messages")

    def __init__(self) -> None:
        self.identities: set[int] = set()
        self.num_messages = 0
        self._next_number = 0
        self._is_in_order = True

    def receive(self, message: CachedPrefixes) -> bool:
        """Applies a message. Returns False if an earlier one is missing: the caller then asks the worker to repeat
        everything. Raises ValueError for malformed identities."""
        if message.is_whole:
            self.identities = set()
            self._is_in_order = True
        elif not self._is_in_order:
            return True
        elif message.number != self._next_number:
            self._is_in_order = False
            return False
        self._next_number = message.number + 1
        self.num_messages += 1
        self.identities.difference_update(unpack_identities(message.removed))
        self.identities.update(unpack_identities(message.stored))
        return True
