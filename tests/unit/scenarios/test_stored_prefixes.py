"""Routers know a page store's pages by tier, for any changes and any reading pace."""

import random
from collections import deque
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.page_changes import PageChangeLog
from tandem.router.workers.store_prefixes import NUM_OWN_TIERS, StorePrefixes
from tandem.rpc.prefix_feed import CacheAccount, PrefixFeed

NUM_PAGES = 30
MAX_UNREAD_BYTES = 64


class Reader:
    """A router's end of a stream; it replaces the store's writer."""

    def __init__(self, account: CacheAccount) -> None:
        self._account = account
        self.begin()

    def begin(self) -> None:
        self.num_sent = self.num_taken = 0
        self._messages: deque[Any] = deque()
        self.prefixes = StorePrefixes(lambda: 10**6)
        self.feed = PrefixFeed(self._account, self, MAX_UNREAD_BYTES)  # type: ignore[arg-type]
        self.feed.catch_up()

    def send(self, messages: list[Any]) -> None:
        self.num_sent += len(messages)
        self._messages.extend(messages)
        # Changes and parts of the whole, each with one message beyond the limit.
        assert sum(len(m.stored) + len(m.removed) for m in self._messages) <= 2 * MAX_UNREAD_BYTES + 2 * 2 * 2 * 8

    def read(self, count: int = 1_000_000, *, is_lost: bool = False) -> None:
        while self._messages and count:
            message = self._messages.popleft()
            self.num_taken += 1
            count -= 1
            if not (is_lost and not message.is_whole) and not self.prefixes.receive(message):
                self.feed.begin_anew()

    def read_all(self) -> None:
        while self._messages:
            self.read()
            self.feed.catch_up()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_routers_know_the_store(seed: int) -> None:
    chance = random.Random(seed)
    held: list[set[int]] = [set() for _ in range(NUM_OWN_TIERS)]
    logs = [PageChangeLog() for _ in held]
    account = CacheAccount(part_identities=2)
    quick, slow = Reader(account), Reader(account)

    def publish() -> None:
        taken = [(tier, changes) for tier, log in enumerate(logs) if (changes := log.take()) is not None]
        for tier, changes in taken:
            account.apply(changes, tier)
        for tier, changes in taken:
            for reader in (quick, slow):
                reader.feed.tell_changes(b"".join(changes.stored), b"".join(changes.removed), tier)
        for reader in (quick, slow):
            reader.feed.catch_up()

    def check(reader: Reader) -> None:
        reader.read_all()
        for known, pages in zip(reader.prefixes.tiers, held, strict=True):
            assert len(known) == len(pages) and all(page in known for page in pages)

    for _ in range(150):
        match chance.randrange(8):
            case 0 | 1 | 2 | 3:
                tier, page = chance.randrange(NUM_OWN_TIERS), chance.randrange(NUM_PAGES)
                is_held = page in held[tier]
                (logs[tier].remove if is_held else logs[tier].store)(page.to_bytes(8, "little"))
                held[tier] ^= {page}
            case 4:
                publish()
                check(quick)
            case 5 | 6:
                slow.read(chance.randrange(4), is_lost=chance.randrange(6) == 0)
            case 7 if chance.randrange(6) == 0:
                slow.begin()
    publish()
    slow.read_all()
    # A gap at the end is noticed with the next change.
    logs[0].store((NUM_PAGES).to_bytes(8, "little"))
    held[0].add(NUM_PAGES)
    publish()
    check(slow)
