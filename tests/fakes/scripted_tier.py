"""A page store's tier whose loads arrive at the test's command."""

from collections.abc import Sequence

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.messages import TierHits
from tandem.worker.events import Event
from tandem.worker.page_tier import PageTier, PrefetchKey
from tests.fakes.engine import FakeEngine


class ScriptedTier(PageTier):
    """Fails a test that opens a prefetch twice, or ends one that is not open.

    Attributes:
        open: token ids of each open prefetch.
        begun, ended: keys in the order of their calls.
        loading: requests whose pages are coming.
        hits: answers of `end`, by request.
        num_yields: number of coming `yields_pages` that return True.
        num_asked: calls of `yields_pages`.
    """

    def __init__(self) -> None:
        self.open: dict[PrefetchKey, tuple[int, ...]] = {}
        self.begun: list[PrefetchKey] = []
        self.ended: list[PrefetchKey] = []
        self.loading: set[str] = set()
        self.hits: dict[str, TierHits] = {}
        self.num_yields = 0
        self.num_asked = 0

    def prefetch(self, key: PrefetchKey, token_ids: Sequence[int], namespace: str, priority: int = 0) -> None:
        assert key not in self.open, f"{key} is prefetched twice"
        self.open[key] = tuple(token_ids)
        self.begun.append(key)

    def is_loading(self, key: PrefetchKey) -> bool:
        assert key in self.open
        return key[0] in self.loading

    def end(self, key: PrefetchKey) -> TierHits:
        assert key in self.open, f"{key} is ended twice, or was not prefetched"
        del self.open[key]
        self.ended.append(key)
        return self.hits.get(key[0], TierHits())

    def yields_pages(self) -> bool:
        self.num_asked += 1
        self.num_yields -= 1
        return self.num_yields >= 0

    def receive(self, event: Event) -> None:
        pass

    def settle(self) -> bool:
        return False

    def load_token_s(self) -> tuple[float, ...]:
        return ()

    def next_deadline(self) -> float | None:
        return None

    def reset(self) -> None:
        pass

    def check_integrity(self) -> str:
        return ""

    def load(self, key: PrefetchKey, num_tokens: int, cache: CacheManager, engine: FakeEngine) -> None:
        """Bring the first tokens of an open prefetch into the tree."""
        token_ids = self.open[key][:num_tokens]
        handle = cache.acquire_pages(token_ids, num_tokens, max_cached_len=num_tokens)
        assert handle is not None
        engine.write(handle.page_ids, 0, token_ids)
        cache.cache_pages(handle, token_ids, num_tokens)
        cache.release_pages(handle)
        cache.free_deferred_pages()
