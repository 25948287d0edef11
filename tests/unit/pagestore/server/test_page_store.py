"""Sessions, writers, readers and restarts of a store."""

from dataclasses import replace

import pytest

from tandem.pagestore.messages import (
    DISK,
    HOST,
    NO_ROOM,
    PRESENT,
    EndFind,
    Find,
    Found,
    GaveUp,
    Put,
    StoreClientMessage,
    Wrote,
)
from tandem.pagestore.server.page_store import PageStore
from tandem.router.frontends.access import CacheNamespaces
from tests.fakes.clock import FakeClock
from tests.fakes.slow_tier import FakeSlowTier
from tests.fakes.store_client import StoreClient, hello, identity, key


def new_store(num_slots: int = 4, max_namespace_share: float = 1.0) -> PageStore:
    return PageStore(num_slots, FakeClock(), max_namespace_share=max_namespace_share)


def test_pages_are_found_once_they_are_written() -> None:
    client = StoreClient(new_store())
    grants = client.put(["a", "ab", "abc"])
    assert client.num_stored(["a", "ab", "abc"]) == 0
    client.wrote(grants[:2])
    found = client.find(["a", "ab", "abc"])
    assert list(zip(found.slots, found.generations, strict=True)) == grants[:2]
    assert (found.tiers, found.num_coming) == ((HOST, HOST), 0)
    assert client.store.check_integrity() == ""


def test_a_key_has_one_writer() -> None:
    store = new_store()
    first, second = StoreClient(store, "first"), StoreClient(store, "second")
    grants = first.put(["a"])
    assert second.put(["a"]) == [(PRESENT, 0)]
    second.wrote(grants)
    assert second.num_stored(["a"]) == 0
    first.wrote(grants)
    assert second.num_stored(["a"]) == 1


def test_a_slot_given_up_is_granted_again_under_another_generation() -> None:
    client = StoreClient(new_store(num_slots=1))
    (old,) = client.put(["a"])
    client.gave_up([old])
    (new,) = client.put(["b"])
    assert old[0] == new[0] and old[1] != new[1]
    client.wrote([old])
    assert client.num_stored(["b"]) == 0


def test_a_page_behind_a_gap_gets_no_slot() -> None:
    client = StoreClient(new_store(num_slots=2))
    assert client.put(["ab"], parent="a") == [(NO_ROOM, 0)]
    assert [slot >= 0 for slot, _ in client.put(["a", "ab", "abc", "abcd"])] == [True, True, False, False]
    assert client.store.stats().num_free == 0


def test_leaves_go_first_then_the_least_recently_used() -> None:
    client = StoreClient(new_store(num_slots=4))
    store, chains = client.store, (["a", "ab"], ["b", "bc"])
    for names in chains:
        client.store_pages(names)
    client.end_find(client.find(["a", "ab"]))
    store.take_changes()
    removed = []
    for name in "cde":
        client.store_pages([name])
        removed.extend(store.take_changes()[HOST].removed)
    assert removed == [identity("bc"), identity("b"), identity("ab")]


def test_a_put_does_not_evict_its_own_prefix() -> None:
    client = StoreClient(new_store(num_slots=1))
    client.store_pages(["a"])
    assert client.put(["ab"], parent="a") == [(NO_ROOM, 0)]
    assert client.put(["a", "ab"]) == [(PRESENT, 0), (NO_ROOM, 0)]
    assert client.num_stored(["a"]) == 1


def test_a_reader_that_stands_still_keeps_only_its_slots() -> None:
    store = new_store(num_slots=3)
    writer, reader = StoreClient(store, "writer"), StoreClient(store, "reader")
    writer.store_pages(["a", "ab"])
    found = reader.find(["a", "ab"])
    for name in ("x", "y", "z"):
        assert writer.store_pages([name])[0] >= 0
    assert writer.put(["w", "wx"])[1] == (NO_ROOM, 0)
    reader.end_find(found)
    assert writer.put(["v"])[0][0] in found.slots


def test_slots_of_a_lost_session_wait_for_its_process() -> None:
    store = new_store(num_slots=2)
    lost, other = StoreClient(store, "lost", pid=1), StoreClient(store, "other", pid=2)
    lost.put(["a"])
    store.close_session("lost")
    store.poll()
    assert other.put(["a"]) == [(PRESENT, 0)]
    assert [slot >= 0 for slot, _ in other.put(["b", "bc"])] == [True, False]
    lost.is_gone = True
    store.poll()
    assert other.put(["a"])[0][0] >= 0
    assert store.check_integrity() == ""


def test_a_new_session_of_the_same_life_ends_the_old_ones_copies() -> None:
    store = new_store(num_slots=2)
    client = StoreClient(store, "old", incarnation="life")
    client.store_pages(["a"])
    client.find(["a"])
    client.put(["b"])
    again = StoreClient(store, "new", incarnation="life")
    assert store.stats().num_free == 1 and store.stats().num_pinned == 0
    with pytest.raises(ValueError, match="no session old"):
        store.receive("old", EndFind(1))
    assert again.num_stored(["a"]) == 1


@pytest.mark.parametrize("is_open", [True, False])
def test_a_hello_that_was_overtaken_frees_nothing(is_open: bool) -> None:
    """Its worker waited in vain for an answer, opened a session since, and may copy in that one."""
    store = new_store(num_slots=1)
    later = replace(hello("life"), attempt=2)
    store.open_session("later", later, lambda: False)
    store.receive("later", Put(1, "", b"", (key("a"),), (identity("a"),)))
    if not is_open:
        store.close_session("later")
    with pytest.raises(ValueError, match="attempt 1 to open a session comes after attempt 2"):
        store.open_session("late", replace(later, attempt=1), lambda: False)
    assert store.stats().num_free == 0 and store.check_integrity() == ""
    store.open_session("next", replace(later, attempt=3), lambda: False)
    assert store.stats().num_free == 1


def test_a_purge_frees_slots_after_their_users() -> None:
    client = StoreClient(new_store(num_slots=3))
    client.store_pages(["a", "b"])
    read = client.find(["a"])
    written = client.put(["c"])
    client.purge()
    assert client.num_stored(["a"]) == client.num_stored(["b"]) == 0
    assert client.store.stats().num_free == 1
    client.wrote(written)
    assert client.num_stored(["c"]) == 0
    client.end_find(read)
    assert client.store.stats().num_free == 3


def test_a_new_life_grants_nothing_before_former_users_are_quiet() -> None:
    gone: set[int] = set()
    former = {1: lambda: 1 in gone, 2: lambda: 2 in gone}
    disk = FakeSlowTier()
    store = PageStore(4, FakeClock(), [(DISK, disk)], former)
    client = StoreClient(store, "one", pid=1)
    assert client.put(["a"]) == [(NO_ROOM, 0)]
    assert client.find(["a"]).num_coming == 0 and not store.stats().is_quiet
    gone.add(2)
    store.poll()
    assert client.put(["a"])[0][0] >= 0


def test_a_namespace_takes_the_place_of_its_own_pages() -> None:
    client = StoreClient(new_store(num_slots=4, max_namespace_share=0.5))
    client.store_pages(["a"], namespace="x")
    client.store_pages(["b"], namespace="x")
    client.store_pages(["c"], namespace="y")
    client.store_pages(["d"], namespace="x")
    assert [client.num_stored([name]) for name in "abcd"] == [0, 1, 1, 1]
    held = client.find(["b"]), client.find(["d"])
    assert client.put(["e"], namespace="x") == [(NO_ROOM, 0)]
    assert client.put(["e"], namespace="y")[0][0] >= 0
    assert all(found.slots for found in held) and client.store.check_integrity() == ""


def test_answers_wait_for_a_purge_that_the_store_s_death_would_undo() -> None:
    disk = FakeSlowTier()
    client = StoreClient(store := PageStore(4, FakeClock(), [(DISK, disk)]))
    client.purge()
    disk.has_unrecorded_purge = True
    store.receive(client.session, Find(1, "", (key("a"),)))
    assert store.take_outgoing() == {}
    disk.has_unrecorded_purge = False
    assert [type(message) for message in store.take_outgoing()[client.session]] == [Found]


def test_a_key_gains_nothing_by_many_namespaces() -> None:
    client = StoreClient(new_store(num_slots=4, max_namespace_share=0.5))
    client.store_pages(["other"], namespace=CacheNamespaces("secret", False).of("another key", ""))
    for number in range(6):
        client.store_pages([f"page {number}"], namespace=CacheNamespaces("secret", False).of("key", f"chat {number}"))
    assert client.num_stored(["other"]) == 1
    assert [client.num_stored([f"page {number}"]) for number in range(6)] == [0, 0, 0, 0, 1, 1]
    assert client.store.check_integrity() == ""


def test_changes_of_memory_and_disk_are_told_apart() -> None:
    disk = FakeSlowTier()
    store = PageStore(1, FakeClock(), [(DISK, disk)])
    client = StoreClient(store)
    (slot,) = client.store_pages(["a"])
    assert store.take_changes() == {HOST: ((identity("a"),), ())}
    disk.end_write(slot)
    store.poll()
    assert store.take_changes() == {DISK: ((identity("a"),), ())}
    client.store_pages(["b"])
    assert store.take_changes() == {HOST: ((identity("b"),), (identity("a"),))}
    assert store.take_changes() == {}


@pytest.mark.parametrize(
    "message",
    [
        hello(),
        Put(1, "", b"", (b"short",), (identity("a"),)),
        Put(1, "", b"", (key("a"),), (b"short",)),
        Put(1, "", b"short", (key("a"),), (identity("a"),)),
        Put(1, "", b"", (key("a"),), ()),
        Put(1, "", b"", (key("a"), key("a")), (identity("a"), identity("a"))),
        Find(1, "", (b"short",)),
        Find(1, "", (key("a"), key("a"))),
        Wrote((1, 2), (1,)),
        GaveUp((), (1,)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_violation_changes_nothing(message: StoreClientMessage) -> None:
    store = new_store()
    StoreClient(store)
    before = store.stats()
    with pytest.raises(ValueError):
        store.receive("s", message)
    assert store.stats() == before and store.take_outgoing() == {}


def test_numbers_that_are_unknown_have_no_effect() -> None:
    client = StoreClient(new_store())
    client.store_pages(["a"])
    client.store.receive("s", EndFind(99))
    client.store.receive("s", Wrote((0, 3, 2**31), (7, 1, 1)))
    client.store.receive("s", GaveUp((0,), (1,)))
    assert client.num_stored(["a"]) == 1


def test_a_number_names_one_find_at_a_time() -> None:
    client = StoreClient(new_store())
    client.store.receive("s", Find(5, "", ()))
    with pytest.raises(ValueError, match="running already"):
        client.store.receive("s", Find(5, "", ()))
    client.store.receive("s", EndFind(5))
    client.store.receive("s", Find(5, "", ()))


def test_stats_count_slots_and_answers() -> None:
    client = StoreClient(new_store(num_slots=3))
    client.store_pages(["a"])
    client.put(["a", "ab"])
    client.find(["a", "ab"])
    stats = client.store.stats()
    assert (stats.num_free, stats.num_writing, stats.num_ready, stats.num_pinned) == (1, 1, 1, 1)
    counts = stats.counts
    assert (counts.pages_granted, counts.pages_present, counts.pages_written) == (2, 1, 1)
    assert (counts.keys_sought, counts.keys_missed, counts.hits) == (2, 1, {HOST: 1})
