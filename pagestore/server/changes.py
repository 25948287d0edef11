"""Changes of a tier's content, for routing."""

from typing import NamedTuple


class PageChanges(NamedTuple):
    """Identities (tandem.prefix) of pages added and removed."""

    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class PageChangeLog:
    """Net changes since the last take: a page added and removed in between cancels out, which bounds the log."""

    def __init__(self) -> None:
        self._is_stored: dict[bytes, bool] = {}

    def store(self, identity: bytes) -> None:
        self._set(identity, True)

    def remove(self, identity: bytes) -> None:
        self._set(identity, False)

    def _set(self, identity: bytes, is_stored: bool) -> None:
        if self._is_stored.get(identity, is_stored) is not is_stored:
            del self._is_stored[identity]
        else:
            self._is_stored[identity] = is_stored

    def take(self) -> PageChanges:
        changes = self._is_stored
        self._is_stored = {}
        return PageChanges(
            tuple(identity for identity, is_stored in changes.items() if is_stored),
            tuple(identity for identity, is_stored in changes.items() if not is_stored),
        )
