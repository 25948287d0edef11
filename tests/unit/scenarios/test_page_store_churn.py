"""Many more tokens than fit pass through a worker's tier and a store: contents stay right, and memory flat."""

import gc
import random
import time
import tracemalloc
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import pytest

from tandem.engine.kvcache.cache_manager import CacheManager, PageHandle
from tandem.engine.launch_list import LaunchList
from tandem.messages import PROTOCOL_VERSION, PageFormat
from tandem.pagestore.client.cpu_copies import CpuRegionCopies
from tandem.pagestore.client.events import FromStore, StoreOpened
from tandem.pagestore.client.tier import StoreTier
from tandem.pagestore.messages import StoreClientMessage, StoreHello, StoreWelcome
from tandem.pagestore.server.page_store import PageStore
from tandem.worker.page_tier import TierHits

PAGE_SIZE = 16
PAGE_BYTES = 64
FORMAT = PageFormat("model", PAGE_BYTES, "layout")
NUM_PAGES, NUM_SLOTS = 96, 512
SESSION = "session"
WAIT_S = 10.0
MAX_GROWTH_BYTES = 256 * 1024


class Churn:
    """Attributes: hits: tokens loaded."""

    def __init__(self) -> None:
        self._pool, self._region = (np.zeros((rows, PAGE_BYTES), np.uint8) for rows in (NUM_PAGES, NUM_SLOTS))
        self._copies = CpuRegionCopies(self._pool, self._region)
        self._cache = CacheManager(NUM_PAGES, PAGE_SIZE)
        self._outbox: list[StoreClientMessage] = []
        self._tier = StoreTier(
            self._cache,
            LaunchList(PAGE_SIZE),
            self._copies,
            FORMAT,
            lambda epoch, message: self._outbox.append(message),
            time.monotonic,
            # Every load is worth it.
            lambda num_cached, num_tokens: 10.0,
        )
        self._store = PageStore(NUM_SLOTS, time.monotonic)
        hello = StoreHello(PROTOCOL_VERSION, "worker", "life", 1, FORMAT)
        self._store.open_session(SESSION, hello, lambda: False)
        self._number = 0
        self.num_tokens = 0
        self.num_loaded = 0

    def close(self) -> None:
        self._copies.close()

    def serve(self, token_ids: Sequence[int], namespace: str) -> None:
        """Compute a prompt behind what is cached or stored of it."""
        self._number += 1
        key = (f"request-{self._number}", 0, "prefill")
        self._tier.prefetch(key, token_ids, namespace)
        self._turn_while(lambda: self._tier.is_loading(key))
        loaded: TierHits = self._tier.end(key)
        handle: PageHandle | None = None

        def is_full() -> bool:
            nonlocal handle
            handle = self._cache.acquire_pages(
                token_ids, len(token_ids), max_cached_len=len(token_ids) - 1, namespace=namespace
            )
            return handle is None

        self._turn_while(is_full)
        assert handle is not None
        content = self._pool[list(handle.page_ids)]
        marks = _marks(token_ids, namespace)
        assert (content[: handle.num_shared] == marks[: handle.num_shared]).all(), "a page holds another's content"
        self._pool[list(handle.page_ids)] = marks
        self._cache.cache_pages(handle, token_ids, len(token_ids))
        self._cache.release_pages(handle)
        self.num_tokens += len(token_ids)
        self.num_loaded += loaded.host
        self._turn()

    def check(self) -> None:
        assert self._cache.check_integrity() == self._store.check_integrity() == ""

    def _turn_while(self, is_so: object) -> None:
        assert callable(is_so)
        deadline = time.monotonic() + WAIT_S
        while is_so():
            assert time.monotonic() < deadline, "a copy never ends"
            self._turn()
            time.sleep(0)

    def _turn(self) -> None:
        self._tier.settle()
        self._cache.free_deferred_pages()
        self._cache.take_changes()
        outbox, self._outbox = self._outbox, []
        for message in outbox:
            self._store.receive(SESSION, message)
        self._store.poll()
        self._store.take_changes()
        for answer in self._store.take_outgoing().get(SESSION, ()):
            if isinstance(answer, StoreWelcome):
                self._tier.receive(StoreOpened(answer.epoch, answer.num_slots))
            else:
                self._tier.receive(FromStore(self._store.epoch, answer))


def _marks(token_ids: Sequence[int], namespace: str) -> np.ndarray:
    """Return (num_pages, PAGE_BYTES) uint8: content that only these tokens have."""
    digest = blake2b(namespace.encode(), digest_size=PAGE_BYTES)
    rows = []
    for start in range(0, len(token_ids), PAGE_SIZE):
        digest.update(np.asarray(token_ids[start : start + PAGE_SIZE], np.uint32).tobytes())
        rows.append(np.frombuffer(digest.digest(), np.uint8))
    return np.stack(rows)


@pytest.mark.parametrize("num_tokens", [100_000, pytest.param(10_000_000, marks=[pytest.mark.slow])])
@pytest.mark.timeout(1200)
def test_memory_is_flat(num_tokens: int) -> None:
    rng = random.Random(0)
    # Together they are three times as large as the store.
    seeds = range(48)
    churn = Churn()
    traced: list[int] = []
    tracemalloc.start()
    try:
        while churn.num_tokens < num_tokens:
            seed = rng.choice(seeds)
            # Conversations of two clients are equal.
            tokens = random.Random(seed // 2).choices(range(50_000), k=rng.randint(16, 64) * PAGE_SIZE)
            churn.serve(tokens, f"client-{seed % 2}")
            if churn.num_tokens >= num_tokens * (len(traced) + 1) / 6:
                churn.check()
                gc.collect()
                traced.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
        churn.close()
    assert churn.num_loaded > num_tokens / 10
    assert max(traced[2:]) - traced[1] < MAX_GROWTH_BYTES, traced
