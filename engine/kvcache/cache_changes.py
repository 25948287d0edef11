"""What has entered and left the radix cache, for those who keep an account of it elsewhere."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """By how much the cache differs from what it was when its changes were last taken. The pages are named by the
    identities of the prefixes that end with them (tandem.prefix).

    Attributes:
        stored: are in the cache now and were not then.
        removed: were then and are not now.
    """

    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class ChangeLog:
    """Collects changes. What comes and goes between two looks leaves no trace, so it never holds more than the pages
    that were there and those that are."""

    def __init__(self) -> None:
        # They are dicts because sets have no order of their own.
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def store(self, identity: bytes) -> None:
        """A page has entered the cache."""
        if identity in self._removed:
            del self._removed[identity]
        else:
            self._stored[identity] = None

    def remove(self, identity: bytes) -> None:
        """A page has left it."""
        if identity in self._stored:
            del self._stored[identity]
        else:
            self._removed[identity] = None

    def take(self) -> CacheChanges | None:
        """What has changed since the last call; None: nothing has."""
        if not self._stored and not self._removed:
            return None
        changes = CacheChanges(tuple(self._stored), tuple(self._removed))
        self._stored, self._removed = {}, {}
        return changes
