"""Finds that read pages from slower tiers."""

from tandem.pagestore.messages import DISK, HOST, PEER, PRESENT
from tandem.pagestore.server.finds import MAX_READS, PATIENCE_S, READ_AHEAD
from tandem.pagestore.server.page_store import PageStore
from tests.fakes.clock import FakeClock
from tests.fakes.slow_tier import FakeSlowTier
from tests.fakes.store_client import StoreClient, key, stored_page


def chain(letter: str, num_pages: int) -> list[str]:
    return [f"{letter}{number}" for number in range(num_pages)]


class Setup:
    """A store over a disk that holds pages of chains, and no peers' unless given."""

    def __init__(self, num_slots: int = 8, *chains: list[str]) -> None:
        self.disk, self.peers, self.clock = FakeSlowTier(), FakeSlowTier(0), FakeClock()
        for names in chains:
            for parent, name in zip(["", *names], names, strict=False):
                self.disk.add(stored_page(name, parent))
        self.store = PageStore(num_slots, self.clock, [(DISK, self.disk), (PEER, self.peers)])

    def end_read(self, name: str, ok: bool = True) -> None:
        (slot,) = [slot for slot, page in self.disk.reads.items() if page.key == key(name)]
        self.disk.end_read(slot, ok)


def test_pages_of_memory_are_answered_at_once_and_others_as_they_arrive() -> None:
    names = chain("a", 3)
    setup = Setup(8, names)
    client = StoreClient(setup.store)
    client.store_pages(names[:1])
    found = client.find([*names, "beyond"])
    assert (found.tiers, found.num_coming) == ((HOST,), 2)
    setup.end_read("a2")
    assert client.found() == []
    setup.end_read("a1")
    (rest,) = client.found()
    assert (rest.first, rest.tiers, rest.num_coming) == (1, (DISK, DISK), 0)
    assert client.num_stored(names) == 3 and not setup.disk.reads
    assert setup.store.check_integrity() == ""


def test_one_read_serves_two_finds() -> None:
    setup = Setup(8, chain("a", 2))
    first, second = StoreClient(setup.store, "first"), StoreClient(setup.store, "second")
    first.find(["a0", "a1"])
    second.find(["a0"])
    assert len(setup.disk.reads) == 2
    setup.end_read("a0")
    setup.store.poll()
    outgoing = setup.store.take_outgoing()
    assert {name: messages[0].num_coming for name, messages in outgoing.items()} == {"first": 1, "second": 0}  # type: ignore[union-attr]
    assert setup.store.check_integrity() == ""


def test_a_failed_read_ends_the_run() -> None:
    setup = Setup(8, chain("a", 3))
    client = StoreClient(setup.store)
    client.find(chain("a", 3))
    setup.end_read("a2")
    setup.end_read("a1", ok=False)
    assert client.found() == []
    setup.end_read("a0")
    (last,) = client.found()
    assert (len(last.slots), last.num_coming) == (1, 0)
    assert setup.store.stats().num_pinned == 1


def test_a_page_being_read_is_present_and_a_page_on_disk_gets_a_slot() -> None:
    setup = Setup(8, chain("a", 2))
    client = StoreClient(setup.store)
    client.find(["a0"])
    granted = client.put(["a0", "a1"])
    assert granted[0] == (PRESENT, 0) and granted[1][0] >= 0


def test_a_find_ends_where_no_slot_is_free() -> None:
    setup = Setup(2, chain("a", 4))
    client = StoreClient(setup.store)
    assert client.find(chain("a", 4)).num_coming == 2
    other = StoreClient(setup.store, "other")
    assert other.find(["a3"]).num_coming == 0


def test_a_read_evicts_pages_that_nobody_uses() -> None:
    setup = Setup(2, chain("a", 2))
    client = StoreClient(setup.store)
    for slot in client.store_pages(["x", "y"]):
        setup.disk.end_write(slot, ok=False)
    setup.store.poll()
    assert client.find(chain("a", 2)).num_coming == 2
    assert setup.store.stats().num_evictions == 2


def test_an_ended_find_leaves_its_reads_to_others() -> None:
    setup = Setup(8, chain("a", 2))
    client = StoreClient(setup.store)
    client.end_find(client.find(chain("a", 2)))
    setup.end_read("a0")
    setup.end_read("a1")
    assert client.found() == []
    found = client.find(chain("a", 2))
    assert (found.tiers, found.num_coming) == ((HOST, HOST), 0)


def test_a_lost_session_keeps_only_answered_pages() -> None:
    setup = Setup(8, chain("a", 3))
    client = StoreClient(setup.store)
    client.find(chain("a", 3))
    setup.end_read("a0")
    setup.end_read("a2")
    client.found()
    setup.store.close_session("s")
    setup.end_read("a1")
    setup.store.poll()
    assert (setup.store.stats().num_pinned, setup.store.take_outgoing()) == (1, {})
    client.is_gone = True
    setup.store.poll()
    assert setup.store.stats().num_pinned == 0 and setup.store.check_integrity() == ""


def test_a_purge_ends_finds_and_keeps_slots_that_are_read_into() -> None:
    setup = Setup(2, chain("a", 2))
    client = StoreClient(setup.store)
    found = client.find(chain("a", 2))
    slots = list(setup.disk.reads)
    client.purge()
    assert [(last.first, last.num_coming) for last in client.found()] == [(0, 0)]
    assert setup.store.stats().num_free == 0 and client.num_stored(chain("a", 2)) == 0
    for slot in slots:
        setup.disk.end_read(slot)
    setup.store.poll()
    assert setup.store.stats().num_free == 2
    client.end_find(found)


def test_a_find_reads_a_bounded_number_of_pages_ahead() -> None:
    names = chain("a", READ_AHEAD + 3)
    setup = Setup(100, names)
    client = StoreClient(setup.store)
    assert client.find(names).num_coming == len(names)
    assert len(setup.disk.reads) == READ_AHEAD
    setup.end_read("a0")
    assert client.found()[0].num_coming == len(names) - 1
    assert len(setup.disk.reads) == READ_AHEAD


def test_finds_take_turns_to_read() -> None:
    chains = [chain(chr(ord("a") + number), READ_AHEAD) for number in range(MAX_READS // READ_AHEAD + 1)]
    setup = Setup(1000, *chains)
    client = StoreClient(setup.store)
    founds = [client.find(names) for names in chains]
    assert all(found.num_coming == READ_AHEAD for found in founds)
    assert len(setup.disk.reads) == MAX_READS
    setup.end_read("a0")
    client.found()
    assert sum(page.key == key(chains[-1][0]) for page in setup.disk.reads.values()) == 1
    client.end_find(founds[-1])
    setup.end_read("a1")
    client.found()
    assert len(setup.disk.reads) == MAX_READS - 1 and setup.store.check_integrity() == ""


def test_a_find_does_not_wait_forever() -> None:
    setup = Setup(8, chain("a", 2))
    client = StoreClient(setup.store)
    client.find(chain("a", 2))
    setup.clock.advance(PATIENCE_S - 1)
    setup.end_read("a0")
    assert [found.num_coming for found in client.found()] == [1]
    setup.clock.advance(PATIENCE_S - 1)
    assert client.found() == []
    setup.clock.advance(1)
    (last,) = client.found()
    assert (last.first, last.slots, last.num_coming) == (1, (), 0)
    assert setup.store.stats().num_reading == 1
    setup.end_read("a1")
    assert client.found() == [] and setup.store.check_integrity() == ""


def test_the_first_tier_that_holds_a_page_is_read() -> None:
    setup = Setup(8, ["a0"])
    setup.peers.add(stored_page("a0"))
    setup.peers.add(stored_page("a1", "a0"))
    client = StoreClient(setup.store)
    assert client.find(["a0", "a1"]).num_coming == 2
    assert (len(setup.disk.reads), len(setup.peers.reads)) == (1, 1)


def test_a_page_behind_a_hole_stays_until_its_turn() -> None:
    setup = Setup(3, ["a0"])
    client = StoreClient(setup.store)
    first, second = client.put(["a0", "a1"])
    client.gave_up([first])
    client.wrote([second])
    client.find(["a0", "a1"])
    client.store_pages(["x", "y"])
    setup.end_read("a0")
    (found,) = client.found()
    assert (found.tiers, found.num_coming) == ((DISK, HOST), 0)
