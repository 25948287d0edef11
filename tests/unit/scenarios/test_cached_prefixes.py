"""Routers' prefix indexes match a worker's cache, for any cache changes and any reading pace."""

import random
from collections import deque
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.kvcache.cache_manager import CacheManager, PageHandle
from tandem.router.workers.worker_prefixes import WorkerPrefixes
from tandem.rpc.prefix_feed import CacheAccount, PrefixFeed
from tests.fakes.cached_identities import cached_identities

PAGE_SIZE = 2
NUM_PAGES = 12
MAX_UNREAD_BYTES = 40


class Reader:
    """A router's end of a stream; it replaces the worker's writer."""

    def __init__(self, account: CacheAccount) -> None:
        self._account = account
        self.num_asked = self.num_whole = 0
        self.begin()

    def begin(self) -> None:
        self.num_sent = self.num_taken = 0
        self._messages: deque[Any] = deque()
        self.prefixes = WorkerPrefixes()
        self.feed = PrefixFeed(self._account, self, MAX_UNREAD_BYTES)  # type: ignore[arg-type]
        self.feed.catch_up()

    def send(self, messages: list[Any]) -> None:
        self.num_sent += len(messages)
        self._messages.extend(messages)

    def read(self, count: int = 1_000_000, *, is_lost: bool = False) -> None:
        """Args: is_lost: whether the router misses the changes; real streams do not lose any."""
        while self._messages and count:
            message = self._messages.popleft()
            self.num_taken += 1
            count -= 1
            self.num_whole += message.is_whole
            if not (is_lost and not message.is_whole) and not self.prefixes.receive(message):
                self.num_asked += 1
                self.feed.begin_anew()

    @property
    def num_unread_bytes(self) -> int:
        return sum(len(m.stored) + len(m.removed) for m in self._messages)


class Scene:
    def __init__(self, data: random.Random) -> None:
        self._data = data
        self.cache = CacheManager(NUM_PAGES, PAGE_SIZE)
        self._handles: list[tuple[PageHandle, list[int]]] = []
        self._account = CacheAccount()
        self.quick, self.slow = Reader(self._account), Reader(self._account)

    def act(self) -> None:
        chance = self._data
        match chance.randrange(10):
            case 0 | 1 | 2:
                token_ids = chance.choices(range(2), k=chance.randrange(1, 9))
                handle = self.cache.acquire_pages(
                    token_ids, len(token_ids), max_cached_len=len(token_ids) - 1, namespace=chance.choice(("", "other"))
                )
                if handle is not None:
                    self._handles.append((handle, token_ids))
            case 3 | 4 if self._handles:
                handle, token_ids = chance.choice(self._handles)
                self.cache.cache_pages(handle, token_ids, chance.randint(handle.cached_len, len(token_ids)))
            case 5 if self._handles:
                self.cache.release_pages(self._handles.pop(chance.randrange(len(self._handles)))[0])
            case 6 if chance.randrange(3) == 0:
                self.cache.drop_cached_pages()
            case 7:
                self.publish()
                self.quick.read()
                self.quick.feed.catch_up()
                self.quick.read()
                assert self.quick.prefixes.identities == cached_identities(self.cache)
            case 8:
                self.slow.read(chance.randrange(3), is_lost=chance.randrange(4) == 0)
            case 9 if chance.randrange(6) == 0:
                self.slow.begin()

    def change(self) -> None:
        for handle, _ in self._handles:
            self.cache.release_pages(handle)
        self._handles.clear()
        acquired = self.cache.acquire_pages([7, 7], 2, max_cached_len=0)
        assert acquired is not None
        self.cache.cache_pages(acquired, [7, 7], 2)
        self.cache.release_pages(acquired)

    def publish(self) -> None:
        if any(changes := self.cache.take_changes()):
            self._account.apply(changes)
            stored, removed = b"".join(changes.stored), b"".join(changes.removed)
            for reader in (self.quick, self.slow):
                reader.feed.tell_changes(stored, removed)
        # At most the whole cache once, and a little more.
        assert self.slow.num_unread_bytes <= 8 * NUM_PAGES + MAX_UNREAD_BYTES


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_routers_know_the_cache(seed: int) -> None:
    scene = Scene(random.Random(seed))
    for _ in range(120):
        scene.act()
    scene.slow.begin()
    scene.publish()
    for reader in (scene.quick, scene.slow):
        reader.read()
        reader.feed.catch_up()
        reader.read()
        assert reader.prefixes.identities == cached_identities(scene.cache)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_missed_changes_are_repeated(seed: int) -> None:
    """Once a router reads again after a further change, it knows the whole cache."""
    scene = Scene(random.Random(seed))
    for _ in range(120):
        scene.act()
    scene.publish()
    scene.slow.read()
    scene.slow.feed.catch_up()
    scene.change()
    scene.publish()
    scene.slow.read()
    assert scene.slow.prefixes.identities == cached_identities(scene.cache)
