from array import array
from typing import Any

import pytest

from tandem.messages import (
    PROTOCOL_VERSION,
    CachedPrefixes,
    CacheWasReset,
    Peer,
    Peers,
    RepeatPrefixes,
    ResetCache,
    StoreBeat,
    StoreJoin,
)
from tandem.router.workers.store_registry import RESET_LIMIT_S, RESET_RETRY_S, Store, StoreRegistry
from tests.fakes.clock import FakeClock


class Stores:
    def __init__(self, max_identities: int = 100) -> None:
        self.clock = FakeClock()
        self.registry = StoreRegistry(self.clock, 1.0, max_identities)
        self.sent: list[Any] = []
        self.ended: list[str] = []

    def connect(self, store_id: str, host: str) -> Store:
        join = StoreJoin(PROTOCOL_VERSION, store_id, "life", host)
        return self.registry.connect(join, self.sent.extend, self.ended.append)

    def report(self, store: Store, number: int, *identities: int) -> None:
        message = CachedPrefixes(number, number == 0, array("Q", identities).tobytes())
        self.registry.receive(store, message)


def test_workers_see_the_store_of_their_host_and_all() -> None:
    stores = Stores()
    node = stores.registry.node("a")
    assert node.prefixes is None and not node.everywhere
    own, other = stores.connect("store-0", "a"), stores.connect("store-1", "b")
    assert node.prefixes is own.prefixes and list(node.everywhere) == [own.prefixes, other.prefixes]
    assert stores.registry.node("c").prefixes is None
    stores.registry.lose(own, "it died")
    assert node.prefixes is None and list(node.everywhere) == [other.prefixes]
    assert stores.ended == ["it died"]


def test_a_returned_store_replaces_its_last_life() -> None:
    stores = Stores()
    node = stores.registry.node("a")
    old = stores.connect("store-0", "a")
    stores.report(old, 0, 1)
    new = stores.connect("store-0", "a")
    assert stores.ended == ["it has connected again"]
    assert node.prefixes is new.prefixes and len(new.prefixes) == 0
    # The end of the old stream comes late.
    stores.report(old, 1, 2)
    stores.registry.lose(old, "its stream ended")
    assert node.prefixes is new.prefixes and len(list(stores.registry)) == 1


def test_silent_stores_are_forgotten() -> None:
    stores = Stores()
    silent, loud = stores.connect("store-0", "a"), stores.connect("store-1", "b")
    stores.clock.advance(0.9)
    stores.registry.receive(loud, StoreBeat())
    stores.clock.advance(0.9)
    stores.registry.excuse_silence(0.85)
    stores.registry.lose_silent()
    assert list(stores.registry) == [silent, loud]
    stores.clock.advance(0.2)
    stores.registry.lose_silent()
    assert list(stores.registry) == [loud]
    assert stores.ended == ["silent for 1 s"]


def test_a_missed_report_is_asked_for_again() -> None:
    stores = Stores()
    store = stores.connect("store-0", "a")
    stores.report(store, 0, 1)
    stores.report(store, 2, 3)
    assert stores.sent == [RepeatPrefixes()]


def test_memory_is_bounded_over_all_stores(caplog: pytest.LogCaptureFixture) -> None:
    stores = Stores(max_identities=5)
    one, other = stores.connect("store-0", "a"), stores.connect("store-1", "b")
    stores.report(one, 0, 1, 2, 3)
    stores.report(other, 0, 1, 2, 3)
    stores.report(other, 1, 4)
    stores.report(other, 2, 5)
    assert (len(one.prefixes), len(other.prefixes)) == (3, 2)
    assert caplog.text.count("hold more than the 5 pages") == 1
    stores.registry.lose(one, "it died")
    stores.report(other, 3, 6)
    assert other.prefixes.holds(6)


def test_a_reset_reaches_every_store_also_one_that_is_away() -> None:
    stores = Stores()
    registry, sent = stores.registry, stores.sent
    here, away = stores.connect("store-0", "a"), stores.connect("store-1", "b")
    registry.lose(away, "it died")
    registry.reset()
    assert sent == [ResetCache(1)]
    registry.receive(here, CacheWasReset(1))
    back = stores.connect("store-1", "b")
    for store in (here, back):
        registry.repeat_reset(store)
    assert sent[1:] == [ResetCache(1)], "a store that has answered is not purged again"
    # It dies before it answers.
    back = stores.connect("store-1", "b")
    registry.repeat_reset(back)
    registry.receive(back, CacheWasReset(1))
    registry.repeat_reset(stores.connect("store-1", "b"))
    assert sent[2:] == [ResetCache(1)]
    # An answer to the last but one is none.
    registry.reset()
    registry.reset()
    registry.receive(here, CacheWasReset(2))
    registry.repeat_reset(here)
    assert sent[-1] == ResetCache(3)


def test_a_reset_that_does_not_last_is_repeated_for_a_limited_time() -> None:
    stores = Stores()
    registry, sent = stores.registry, stores.sent
    store = stores.connect("store-0", "a")
    registry.reset()
    assert registry.unreset(1) == {"store-0": "no answer"}
    failed = CacheWasReset(1, "Input/output error")
    while stores.clock() < registry.reset_until:
        registry.receive(store, failed)
        registry.repeat_failed_resets()
        stores.clock.advance(RESET_RETRY_S)
        registry.repeat_failed_resets()
        registry.repeat_failed_resets()
    assert sent == [ResetCache(1)] * int(RESET_LIMIT_S / RESET_RETRY_S)
    assert registry.unreset(1) == {"store-0": "Input/output error"}
    registry.lose(store, "it died")
    assert registry.unreset(1) == {"store-0": "not connected"}
    # Each later life is told again.
    store = stores.connect("store-0", "a")
    registry.repeat_reset(store)
    assert sent.pop() == ResetCache(1)
    registry.receive(store, CacheWasReset(1))
    assert registry.unreset(1) == {}


def test_an_answer_that_a_later_one_has_overtaken_undoes_nothing() -> None:
    stores = Stores()
    registry, sent = stores.registry, stores.sent
    store = stores.connect("store-0", "a")
    registry.reset()
    registry.reset()
    registry.receive(store, CacheWasReset(2))
    registry.receive(store, CacheWasReset(1))
    assert registry.unreset(2) == {}
    registry.repeat_reset(stores.connect("store-0", "a"))
    assert sent == [ResetCache(1), ResetCache(2)], "new pages are purged"


def test_another_message_is_an_error() -> None:
    stores = Stores()
    store = stores.connect("store-0", "a")
    with pytest.raises(ValueError, match="unexpected StoreJoin"):
        stores.registry.receive(store, store.join)


def test_stores_are_told_of_each_other_when_that_changes() -> None:
    registry = StoreRegistry(FakeClock(), 1.0)
    told: dict[str, list[Any]] = {}
    stores = {}
    for name, address in (("a", "a:1"), ("b", "b:1"), ("silent", "")):
        told[name] = []
        join = StoreJoin(PROTOCOL_VERSION, name, f"life of {name}", name, address=address)
        stores[name] = registry.connect(join, told[name].extend, lambda reason: None)
        registry.name_peers()
    a, b = Peer("a", "life of a", "a:1"), Peer("b", "life of b", "b:1")
    assert told == {"a": [Peers((b,))], "b": [Peers((a,))], "silent": [Peers((a, b))]}
    registry.lose(stores["b"], "it died")
    assert told["a"][1:] == [Peers(())] and told["silent"][1:] == [Peers((a,))]


def test_a_reset_waits_for_planned_stores_that_never_connected() -> None:
    stores = Stores()
    registry = StoreRegistry(stores.clock, 1.0, planned=["store-0"])
    registry.reset()
    assert registry.unreset(1) == {"store-0": "not connected"}
    store = registry.connect(
        StoreJoin(PROTOCOL_VERSION, "store-0", "life", "a"), stores.sent.extend, stores.ended.append
    )
    registry.repeat_reset(store)
    assert stores.sent == [ResetCache(1)]
    registry.receive(store, CacheWasReset(1))
    assert registry.unreset(1) == {}
