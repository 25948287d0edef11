"""What a worker says that it has cached."""

from tandem.messages import CachedPrefixes
from tandem.prefix import unpack_identities


class WorkerPrefixes:
    """All prefixes that one life of a worker has cached, as it says itself: a tenth of a second old, as a rule.

    A page is never cached without those before it, so where an identity is here, those of its prefixes are too; but for
    the moment in which a worker says anew all that it has.

    Attributes:
        identities: of prefixes that end with a page (tandem.prefix), at the worker's page size.
        num_messages: how often they may have changed.
    """

    __slots__ = ("_is_in_order", "_next_number", "identities", "num_messages")

    def __init__(self) -> None:
        self.identities: set[int] = set()
        self.num_messages = 0
        self._next_number = 0
        self._is_in_order = True

    def receive(self, message: CachedPrefixes) -> bool:
        """Takes the worker's word. Returns False if something before it did not come: then what is here stays until the
        worker has been asked to begin anew, and has. Raises ValueError: these are no identities."""
        if message.is_whole:
            self.identities = set()
            self._is_in_order = True
        elif not self._is_in_order:
            # It has been asked already.
            return True
        elif message.number != self._next_number:
            self._is_in_order = False
            return False
        self._next_number = message.number + 1
        self.num_messages += 1
        self.identities.difference_update(unpack_identities(message.removed))
        self.identities.update(unpack_identities(message.stored))
        return True
