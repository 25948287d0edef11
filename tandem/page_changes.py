"""Changes of a cache's or a tier's pages, for routing."""

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

# Changes that one take returns. Less is stored in between, so that this holds back only what follows a large purge.
MAX_CHANGES = 16_384


class PageChanges(NamedTuple):
    """Identities (tandem.prefix) of pages added and removed since the last take. No identity is in both."""

    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class PageChangeLog:
    """Net changes since the last take: a page added and removed in between cancels out, which bounds the log.

    The removals of a large purge are returned in parts, and later changes after them.
    """

    def __init__(self) -> None:
        self._is_stored: dict[bytes, bool] = {}
        self._purged: deque[Iterator[bytes]] = deque()

    def store(self, identity: bytes) -> None:
        if self._is_stored.get(identity) is False:
            del self._is_stored[identity]
        else:
            self._is_stored[identity] = True

    def remove(self, identity: bytes) -> None:
        if self._is_stored.get(identity):
            del self._is_stored[identity]
        else:
            self._is_stored[identity] = False

    def remove_all(self, identities: Iterator[bytes]) -> None:
        """Removes all stored pages, given by their identities, in O(1)."""
        self._purged.append(_untold(self._is_stored, identities))
        self._is_stored = {}

    def take(self) -> PageChanges:
        if not self._purged and len(self._is_stored) <= MAX_CHANGES:
            changes, self._is_stored = self._is_stored, {}
            return _sorted_out(changes)
        changes = {}
        while self._purged and len(changes) < MAX_CHANGES:
            part = dict.fromkeys(islice(self._purged[0], MAX_CHANGES - len(changes)), False)
            changes |= part
            if not part:
                self._purged.popleft()
        if not self._purged:
            for identity in list(islice(self._is_stored, MAX_CHANGES)):
                is_stored = self._is_stored.pop(identity)
                # Stored again before the removal by the purge is told.
                if is_stored and identity in changes:
                    del changes[identity]
                else:
                    changes[identity] = is_stored
        return _sorted_out(changes)


def _sorted_out(changes: Mapping[bytes, bool]) -> PageChanges:
    return PageChanges(
        tuple(identity for identity, is_stored in changes.items() if is_stored),
        tuple(identity for identity, is_stored in changes.items() if not is_stored),
    )


def _untold(is_stored: dict[bytes, bool], purged: Iterator[bytes]) -> Iterator[bytes]:
    """Yields removals: those of purged pages whose addition was told, and those logged before the purge."""
    yield from (identity for identity in purged if identity not in is_stored)
    yield from (identity for identity, stored in is_stored.items() if not stored)
