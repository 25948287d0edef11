"""Pages on their way to a slower tier, as the store sends them."""

from tandem.pagestore.messages import DISK, NO_ROOM
from tandem.pagestore.server.page_store import PageStore
from tandem.pagestore.server.write_behind import WriteBehind
from tests.fakes.clock import FakeClock
from tests.fakes.slow_tier import FakeSlowTier
from tests.fakes.store_client import StoreClient, key


def new_client(num_slots: int, disk: FakeSlowTier) -> StoreClient:
    return StoreClient(PageStore(num_slots, FakeClock(), [(DISK, disk)]))


def end_write(client: StoreClient, disk: FakeSlowTier, ok: bool = True) -> bytes:
    slot, page = next(iter(disk.writes.items()))
    disk.end_write(slot, ok)
    client.store.poll()
    return page.key


def test_pages_go_out_in_order_as_the_tier_takes_them() -> None:
    disk = FakeSlowTier(capacity=1)
    client = new_client(4, disk)
    client.store_pages(["a", "ab", "abc"])
    assert client.store.stats().num_queued == 2
    assert [end_write(client, disk) for _ in range(3)] == [key("a"), key("ab"), key("abc")]
    assert client.store.stats().num_pinned == 0 and set(disk.pages) == {key("a"), key("ab"), key("abc")}


def test_a_page_is_not_evicted_while_it_is_written() -> None:
    disk = FakeSlowTier(capacity=1)
    client = new_client(1, disk)
    client.store_pages(["a"])
    assert client.put(["b"]) == [(NO_ROOM, 0)]
    end_write(client, disk, ok=False)
    assert client.put(["b"])[0][0] >= 0
    assert client.store.stats().failed_writes == 1 and client.store.check_integrity() == ""


def test_a_page_on_disk_is_not_written_again() -> None:
    disk = FakeSlowTier()
    client = new_client(2, disk)
    client.store_pages(["a"])
    end_write(client, disk)
    client.store_pages(["b"])
    end_write(client, disk)
    client.store_pages(["c"])
    end_write(client, disk)
    client.store_pages(["a"])
    assert disk.writes == {}


def test_a_tier_that_takes_nothing_does_not_grow_the_queue() -> None:
    disk = FakeSlowTier(capacity=0)
    client = new_client(4, disk)
    for number in range(100):
        client.store_pages([str(number)])
    assert client.store.stats().num_queued <= 8
    disk.capacity = 9
    client.store.poll()
    assert {page.key for page in disk.writes.values()} == {key(str(number)) for number in range(96, 100)}


def test_a_purge_waits_for_writes_in_flight() -> None:
    disk = FakeSlowTier(capacity=1)
    client = new_client(2, disk)
    client.store_pages(["a", "ab"])
    client.purge()
    assert client.store.stats().num_free == 1
    end_write(client, disk)
    assert (client.store.stats().num_free, disk.pages, disk.writes) == (2, {}, {})


def test_an_unknown_slot_is_not_its_transfer() -> None:
    disk = FakeSlowTier()
    client = new_client(1, disk)
    (slot,) = client.store_pages(["a"])
    disk.end_write(slot)
    (transfer,) = disk.take_ended()
    memory = client.store._memory
    assert not WriteBehind(memory, disk).on_ended_write(transfer)
