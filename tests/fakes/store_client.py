"""A worker's end of a page store's session, message by message."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeVar

from tandem.messages import PageFormat
from tandem.pagestore.messages import (
    EndFind,
    Find,
    Found,
    GaveUp,
    Purge,
    Put,
    PutGranted,
    StoreHello,
    StoreServerMessage,
    StoreWelcome,
    Wrote,
)
from tandem.pagestore.server.base import StoredPage
from tandem.pagestore.server.page_store import PageStore

M = TypeVar("M", bound=StoreServerMessage)


def key(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=32).digest()


def identity(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=8).digest()


def stored_page(name: str, parent: str = "", namespace: str = "") -> StoredPage:
    return StoredPage(key(name), key(parent) if parent else b"", identity(name), namespace)


def hello(incarnation: str = "life", pid: int = 1) -> StoreHello:
    return StoreHello(1, "worker", incarnation, pid, PageFormat("f", 4096, "layout"))


class StoreClient:
    """Opens a session with a store. Pages are named by strings; every request takes its answers at once.

    Attributes:
        is_gone: what the store is told of the worker's process.
    """

    def __init__(self, store: PageStore, session: str = "s", incarnation: str | None = None, pid: int = 1) -> None:
        self.store = store
        self.session = session
        self.is_gone = False
        self._number = 0
        store.open_session(session, hello(incarnation or session, pid), lambda: self.is_gone)
        assert self.take(StoreWelcome) == [StoreWelcome(store.epoch, store.stats().num_slots)]

    def take(self, kind: type[M]) -> list[M]:
        """Takes this session's messages; other sessions' are lost."""
        messages = self.store.take_outgoing().get(self.session, [])
        assert all(isinstance(message, kind) for message in messages), messages
        return [message for message in messages if isinstance(message, kind)]

    def put(self, names: Sequence[str], parent: str = "", namespace: str = "") -> list[tuple[int, int]]:
        """Returns slot and generation by page."""
        self._number += 1
        self.store.receive(
            self.session,
            Put(
                self._number,
                namespace,
                key(parent) if parent else b"",
                tuple(map(key, names)),
                tuple(map(identity, names)),
            ),
        )
        (granted,) = self.take(PutGranted)
        assert granted.number == self._number
        return list(zip(granted.slots, granted.generations, strict=True))

    def wrote(self, grants: Sequence[tuple[int, int]]) -> None:
        self.store.receive(self.session, Wrote(tuple(g[0] for g in grants), tuple(g[1] for g in grants)))

    def gave_up(self, grants: Sequence[tuple[int, int]]) -> None:
        self.store.receive(self.session, GaveUp(tuple(g[0] for g in grants), tuple(g[1] for g in grants)))

    def store_pages(self, names: Sequence[str], parent: str = "", namespace: str = "") -> list[int]:
        """Puts and writes pages. Returns their slots, or the reason of those without one."""
        grants = self.put(names, parent, namespace)
        self.wrote([grant for grant in grants if grant[0] >= 0])
        return [slot for slot, _ in grants]

    def find(self, names: Sequence[str]) -> Found:
        self._number += 1
        self.store.receive(self.session, Find(self._number, tuple(map(key, names))))
        (found,) = self.take(Found)
        assert (found.number, found.first) == (self._number, 0)
        return found

    def found(self) -> list[Found]:
        """Lets the store poll. Returns this session's answers."""
        self.store.poll()
        return self.take(Found)

    def end_find(self, found: Found) -> None:
        self.store.receive(self.session, EndFind(found.number))

    def num_stored(self, names: Sequence[str]) -> int:
        """Returns the length of the stored run, and pins nothing."""
        found = self.find(names)
        self.end_find(found)
        return len(found.slots) + found.num_coming

    def purge(self) -> None:
        self.store.receive(self.session, Purge())
