from typing import Any

from tandem.messages import CachedPrefixes
from tandem.page_changes import PageChanges
from tandem.prefix import IDENTITY_BYTES
from tandem.rpc.prefix_feed import PART_IDENTITIES, CacheAccount, PrefixFeed


class Writer:
    def __init__(self) -> None:
        self.told: list[CachedPrefixes] = []
        self.num_sent = self.num_taken = 0

    def send(self, messages: list[Any]) -> None:
        self.told += messages
        self.num_sent += len(messages)

    def read(self) -> list[CachedPrefixes]:
        told, self.told = self.told, []
        self.num_taken = self.num_sent
        return told


def identity(number: int) -> bytes:
    return number.to_bytes(IDENTITY_BYTES, "little")


def test_router_gets_the_whole_cache_then_changes() -> None:
    account, writer = CacheAccount(), Writer()
    account.apply(PageChanges((identity(1),), ()))
    feed = PrefixFeed(account, writer)  # type: ignore[arg-type]
    feed.catch_up()
    feed.tell_changes(identity(2), identity(1))
    feed.catch_up()
    assert writer.read() == [
        CachedPrefixes(0, is_whole=True, stored=identity(1)),
        CachedPrefixes(1, is_whole=False, stored=identity(2), removed=identity(1)),
    ]


def test_large_cache_is_sent_in_parts() -> None:
    account, writer = CacheAccount(), Writer()
    count = 2 * PART_IDENTITIES + 5
    account.apply(PageChanges(tuple(map(identity, range(count))), ()))
    PrefixFeed(account, writer).catch_up()  # type: ignore[arg-type]
    told = writer.read()
    assert [message.is_whole for message in told] == [True, False, False]
    assert [message.number for message in told] == [0, 1, 2]
    assert {part.stored[i : i + 8] for part in told for i in range(0, len(part.stored), 8)} == set(
        map(identity, range(count))
    )


def test_empty_cache_is_sent_too() -> None:
    writer = Writer()
    PrefixFeed(CacheAccount(), writer).catch_up()  # type: ignore[arg-type]
    assert writer.read() == [CachedPrefixes(0, is_whole=True, stored=b"")]


def test_slow_router_has_bounded_backlog_and_restarts() -> None:
    account, writer = CacheAccount(), Writer()
    feed = PrefixFeed(account, writer, max_unread_bytes=3 * IDENTITY_BYTES)  # type: ignore[arg-type]
    feed.catch_up()
    for number in range(10):
        account.apply(PageChanges((identity(number),), ()))
        feed.tell_changes(identity(number), b"")
        feed.catch_up()
    assert [message.is_whole for message in writer.read()] == [True, False, False, False]
    feed.catch_up()
    (whole,) = writer.read()
    assert whole.is_whole
    assert len(whole.stored) == 10 * IDENTITY_BYTES
    feed.tell_changes(identity(10), b"")
    assert writer.read() == [CachedPrefixes(whole.number + 1, is_whole=False, stored=identity(10))]


def test_large_change_is_sent_as_the_whole_cache() -> None:
    account, writer = CacheAccount(), Writer()
    feed = PrefixFeed(account, writer, max_unread_bytes=3 * IDENTITY_BYTES)  # type: ignore[arg-type]
    feed.catch_up()
    writer.read()
    feed.tell_changes(b"", b"".join(map(identity, range(100))))
    assert writer.read() == [CachedPrefixes(1, is_whole=True, stored=b"")]


def test_tiers_are_told_apart() -> None:
    account, writer = CacheAccount(), Writer()
    account.apply(PageChanges((identity(1),), ()), tier=1)
    feed = PrefixFeed(account, writer)  # type: ignore[arg-type]
    feed.catch_up()
    feed.tell_changes(identity(2), b"", tier=1)
    assert writer.read() == [
        CachedPrefixes(0, is_whole=True, stored=identity(1), tier=1),
        CachedPrefixes(1, is_whole=False, stored=identity(2), tier=1),
    ]


def test_large_account_comes_at_the_routers_pace_with_changes_between() -> None:
    account, writer = CacheAccount(part_identities=2), Writer()
    account.apply(PageChanges(tuple(map(identity, range(100))), ()))
    feed = PrefixFeed(account, writer, max_unread_bytes=10 * IDENTITY_BYTES)  # type: ignore[arg-type]
    known: set[bytes] = set()
    feed.catch_up()
    num_turns = 0
    for number in range(100, 400):
        assert sum(len(message.stored) for message in writer.told) <= 13 * IDENTITY_BYTES
        for message in writer.read():
            known.difference_update(_split(message.removed))
            known.update(_split(message.stored))
        gone = identity(number - 60)
        account.apply(PageChanges((identity(number),), (gone,)))
        feed.tell_changes(identity(number), gone)
        feed.catch_up()
        num_turns += bool(writer.told[1:])
    # Ten turns for the account, and then changes alone.
    assert num_turns < 20
    for message in writer.read():
        known.difference_update(_split(message.removed))
        known.update(_split(message.stored))
    assert known == {identity(number) for number in (*range(40), *range(340, 400))}


def test_changes_have_messages_of_limited_size() -> None:
    account, writer = CacheAccount(part_identities=2), Writer()
    feed = PrefixFeed(account, writer)  # type: ignore[arg-type]
    feed.catch_up()
    writer.read()
    stored, removed = [b"".join(map(identity, numbers)) for numbers in (range(3), range(10, 11))]
    feed.tell_changes(stored, removed)
    assert writer.read() == [
        CachedPrefixes(1, False, stored[:16], removed),
        CachedPrefixes(2, False, stored[16:], b""),
    ]


def _split(packed: bytes) -> list[bytes]:
    return [packed[i : i + IDENTITY_BYTES] for i in range(0, len(packed), IDENTITY_BYTES)]
