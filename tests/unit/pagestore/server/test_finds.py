"""Finds that read pages from slower tiers."""

from tandem.pagestore.messages import DISK, HOST, PEER, PRESENT, Find, Found
from tandem.pagestore.server.finds import MAX_READS, PATIENCE_S, READ_AHEAD
from tandem.pagestore.server.page_store import PageStore
from tests.fakes.clock import FakeClock
from tests.fakes.slow_tier import FakeAskedTier, FakeSlowTier
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


class Asking:
    """A store that has no page, and peers that have those of chains."""

    def __init__(self, num_slots: int = 8, *chains: list[str]) -> None:
        self.peers, self.clock = FakeAskedTier(), FakeClock()
        for names in chains:
            for parent, name in zip(["", *names], names, strict=False):
                self.peers.add(stored_page(name, parent))
        self.store = PageStore(num_slots, self.clock, [(PEER, self.peers)])
        self.client = StoreClient(self.store)

    def answer(self) -> Found:
        """Answers the only question. Returns the store's answer."""
        (question,) = self.peers.questions
        self.peers.answer(question)
        (found,) = self.client.found()
        return found


def test_peers_are_asked_for_the_pages_behind_the_run() -> None:
    asking = Asking(8, chain("a", 3))
    asking.client.store_pages(["a0"])
    found = asking.client.find([*chain("a", 3), "beyond"])
    assert (found.tiers, found.num_coming, found.is_asking) == ((HOST,), 0, True)
    assert list(asking.peers.questions.values()) == [(key("a1"), key("a2"), key("beyond"))]
    found = asking.answer()
    assert (found.first, found.tiers, found.num_coming, found.is_asking) == (1, (), 2, False)
    assert asking.store.stats().counts.keys_missed == 1
    for slot in list(asking.peers.reads):
        asking.peers.end_read(slot)
    assert [answer.tiers for answer in asking.client.found()] == [(PEER,), (PEER,)]


def test_peers_without_pages_end_the_find() -> None:
    asking = Asking()
    assert asking.client.find(["a0"]).is_asking
    assert asking.store.stats().num_waiting == 1
    found = asking.answer()
    assert (found.slots, found.num_coming, found.is_asking) == ((), 0, False)
    assert asking.store.stats().num_waiting == 0
    assert asking.store.stats().counts.keys_missed == 1


def test_pages_written_meanwhile_are_answered_with_the_peers() -> None:
    asking = Asking(8, ["a0"])
    asking.client.find(["a0", "a1"])
    asking.client.store_pages(["a0", "a1"])
    assert asking.answer().tiers == (HOST, HOST)
    assert not asking.peers.reads


def test_nobody_is_asked_for_pages_that_are_here_or_being_written() -> None:
    asking = Asking()
    asking.client.store_pages(["a0"])
    asking.client.put(["a1"], parent="a0")
    assert not asking.client.find(["a0", "a1", "a2"]).is_asking
    assert not asking.client.find(["a0"]).is_asking
    asking.peers.is_away = True
    assert not asking.client.find(["b0"]).is_asking


def test_the_end_of_a_find_cancels_its_question() -> None:
    asking = Asking()
    asking.client.end_find(asking.client.find(["a0"]))
    assert not asking.peers.questions
    asking.client.find(["a0"])
    asking.store.close_session("s")
    assert not asking.peers.questions
    assert asking.store.stats().counts.keys_missed == 2


def test_a_purge_and_a_passed_deadline_end_finds_that_ask() -> None:
    asking = Asking()
    asking.client.find(["a0"])
    asking.client.purge()
    assert [found.is_asking for found in asking.client.found()] == [False]
    asking.client.find(["a0"])
    asking.clock.advance(PATIENCE_S)
    assert [found.is_asking for found in asking.client.found()] == [False]
    assert not asking.peers.questions


def test_an_answer_after_the_end_has_no_effect() -> None:
    asking = Asking(8, ["a0"])
    found = asking.client.find(["a0"])
    (question,) = asking.peers.questions
    asking.peers.answer(question)
    asking.client.end_find(found)
    assert asking.client.found() == [] and not asking.peers.reads


def test_a_peer_s_find_asks_no_further_peer_and_is_not_counted() -> None:
    asking = Asking(8, chain("a", 2))
    asking.client.find(chain("a", 2))
    asking.answer()
    for slot in list(asking.peers.reads):
        asking.peers.end_read(slot, ok=slot == 0)
    asking.client.found()
    asking.client.find(chain("a", 2))
    before = asking.store.stats().counts
    asking.store.open_peer_session("peer")
    asking.store.receive("peer", Find(1, (key("a0"), key("a1"))))
    (found,) = asking.store.take_outgoing()["peer"]
    assert isinstance(found, Found)
    assert (len(found.slots), found.num_coming, found.is_asking) == (1, 0, False)
    assert [page.key for page in asking.store.run_of([key("a0"), key("a1")])] == [key("a0")]
    assert asking.store.stats().counts == before
    asking.store.close_session("peer")
    asking.store.poll()
    assert asking.store.stats().num_closed == 0 and asking.store.check_integrity() == ""
