from collections.abc import Callable

import pytest

from tandem.pagestore.messages import DISK
from tandem.pagestore.server.base import StoredPage
from tandem.pagestore.server.page_store import PageStore
from tandem.pagestore.server.slots import READY
from tests.fakes.clock import FakeClock
from tests.fakes.slow_tier import FakeSlowTier
from tests.fakes.store_client import StoreClient, identity, key


def store_in_use() -> PageStore:
    """Returns a store with a page that a find pins, one that is being written, and one that is read from the disk."""
    disk = FakeSlowTier()
    disk.add(StoredPage(key("c"), b"", identity("c"), ""))
    store = PageStore(8, FakeClock(), [(DISK, disk)])
    client = StoreClient(store)
    client.store_pages(["a"])
    client.put(["b"])
    client.find(["a", "c"])
    return store


def lose_writer(store: PageStore) -> None:
    store._sessions.get("s").writing.clear()


def pin_for_nobody(store: PageStore) -> None:
    store._memory.pin(next(slot for slot in range(8) if store._memory.states[slot] >= READY))


def reuse_slot(store: PageStore) -> None:
    (slot,) = store._sessions.get("s").writing
    store._memory._slots.generations[slot] += 1


def pin_twice(store: PageStore) -> None:
    (find,) = store._sessions.get("s").finds.values()
    find.slots *= 2


def forget_read(store: PageStore) -> None:
    (find,) = store._sessions.get("s").finds.values()
    find.coming.clear()


@pytest.mark.parametrize(
    ("damage", "violation"),
    [
        (lambda store: None, ""),
        (lose_writer, "is writing, or has two writers"),
        (pin_for_nobody, "but other users"),
        (reuse_slot, "which is over"),
        (pin_twice, "pins 2 of 1 pages"),
        (forget_read, "does not expect slot"),
    ],
)
def test_a_lost_owner_is_found(damage: Callable[[PageStore], None], violation: str) -> None:
    store = store_in_use()
    damage(store)
    found = store.check_integrity()
    assert violation in found and bool(violation) == bool(found)
