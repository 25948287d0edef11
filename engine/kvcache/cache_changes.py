from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """Pages added and removed since the last take, by the identity of the prefix that each ends (tandem.prefix)."""

    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class ChangeLog:
    """A page added and removed between two takes cancels out, which bounds the log."""

    def __init__(self) -> None:
        # Dicts, because sets have no stable order.
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def store(self, identity: bytes) -> None:
        if identity in self._removed:
            del self._removed[identity]
        else:
            self._stored[identity] = None

    def remove(self, identity: bytes) -> None:
        if identity in self._stored:
            del self._stored[identity]
        else:
            self._removed[identity] = None

    def take(self) -> CacheChanges | None:
        if not self._stored and not self._removed:
            return None
        changes = CacheChanges(tuple(self._stored), tuple(self._removed))
        self._stored, self._removed = {}, {}
        return changes
