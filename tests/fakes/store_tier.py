"""A store tier over a real cache, with a scripted store."""

from typing import Any

from tandem.engine.kvcache.cache_manager import CacheManager, PageHandle
from tandem.engine.launch_list import LaunchList
from tandem.messages import PageFormat
from tandem.pagestore.client.events import FromStore, StoreClosed, StoreOpened
from tandem.pagestore.client.tier import StoreTier
from tandem.pagestore.keys import page_keys, root_key
from tandem.pagestore.messages import HOST, EndFind, Find, Found, Put, PutGranted, StoreServerMessage
from tandem.worker.page_tier import PrefetchKey
from tests.fakes.clock import FakeClock
from tests.fakes.region_copies import ScriptedCopies

SIZE = 2
FORMAT = PageFormat("f" * 32, 64, "page_size=2")
FIRST: PrefetchKey = ("first", 0, "prefill")
SECOND: PrefetchKey = ("second", 0, "prefill")


def tokens(num_pages: int, start: int = 0, extra: int = 0) -> list[int]:
    return list(range(start, start + num_pages * SIZE + extra))


def keys_of(token_ids: list[int], namespace: str = "") -> list[bytes]:
    return page_keys(root_key(FORMAT, namespace), token_ids, SIZE)


class TierSide:
    """
    Attributes:
        sent: (epoch, message) to the store.
        compute_s: time to compute any tokens.
        generation: of the next granted slots.
    """

    def __init__(self, num_pages: int = 64, write_after: int = 0) -> None:
        self.clock = FakeClock()
        self.cache = CacheManager(num_pages, SIZE)
        self.launches = LaunchList(SIZE)
        self.copies = ScriptedCopies()
        self.sent: list[tuple[str, Any]] = []
        self.compute_s = 1.0
        self.next_slot = 0
        self.tier = StoreTier(
            self.cache,
            self.launches,
            self.copies,
            FORMAT,
            lambda epoch, message: self.sent.append((epoch, message)),
            self.clock,
            lambda num_cached, num_tokens: self.compute_s,
            write_after,
        )

    def open(self, epoch: str = "e1") -> None:
        self.tier.receive(StoreOpened(epoch, 1000))

    def close(self, epoch: str = "e1") -> list[int]:
        """Returns a list that grows when the session may open again."""
        calls: list[int] = []
        self.tier.receive(StoreClosed(epoch, lambda: calls.append(1)))
        return calls

    def answer(self, message: StoreServerMessage, epoch: str = "e1") -> None:
        self.tier.receive(FromStore(epoch, message))

    def turn(self, num_turns: int = 1) -> bool:
        has_loaded = False
        for _ in range(num_turns):
            has_loaded |= self.tier.settle()
            violation = self.cache.check_integrity() or self.tier.check_integrity()
            assert violation == "", violation
        return has_loaded

    def take(self, kind: type) -> list[Any]:
        """Removes and returns messages of a kind."""
        taken = [message for _, message in self.sent if isinstance(message, kind)]
        self.sent = [(epoch, message) for epoch, message in self.sent if not isinstance(message, kind)]
        return taken

    def cached(self, token_ids: list[int], namespace: str = "") -> int:
        """Returns the number of cached pages."""
        return len(self.cache.peek(token_ids, namespace))

    def hold(self, token_ids: list[int]) -> PageHandle:
        handle = self.cache.acquire_pages(token_ids, len(token_ids), max_cached_len=len(token_ids))
        assert handle is not None
        return handle

    def compute(self, token_ids: list[int]) -> None:
        """Brings all full pages into the tree, unlocked, with their keys as contents."""
        handle = self.hold(token_ids)
        for page_id, key in zip(handle.page_ids, keys_of(token_ids), strict=False):
            self.copies.pool[page_id] = key
        self.cache.cache_pages(handle, token_ids, len(token_ids))
        self.cache.release_pages(handle)

    def grant(self, put: Put, epoch: str = "e1") -> tuple[int, ...]:
        slots = tuple(range(self.next_slot, self.next_slot + len(put.keys)))
        self.next_slot += len(slots)
        self.answer(PutGranted(put.number, slots, (1,) * len(slots)), epoch)
        return slots

    def store(self, find: Find, num_pages: int | None = None, tier: int = HOST, num_coming: int = 0) -> None:
        """Answers with the first pages, whose keys are the contents of their slots."""
        num_pages = len(find.keys) if num_pages is None else num_pages
        slots = tuple(range(self.next_slot, self.next_slot + num_pages))
        self.next_slot += num_pages
        self.copies.region |= dict(zip(slots, find.keys, strict=False))
        self.answer(Found(find.number, 0, slots, (1,) * num_pages, (tier,) * num_pages, num_coming))

    def find(self) -> Find:
        (find,) = self.take(Find)
        return find

    def ended(self) -> list[int]:
        return [message.number for message in self.take(EndFind)]

    def check_contents(self, token_ids: list[int], namespace: str = "") -> None:
        """Checks that each cached page of a prompt holds its key."""
        for page_id, key in zip(self.cache.peek(token_ids, namespace), keys_of(token_ids, namespace), strict=False):
            assert self.copies.pool[page_id] == key

    def leaks_nothing(self) -> None:
        """Checks that no page is locked or held once everything has ended."""
        assert (self.cache.num_locked_pages, self.cache.num_held_pages) == (0, 0)
        assert self.cache.check_integrity() == ""
