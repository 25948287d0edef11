from collections.abc import Sequence

from tandem.messages import NO_HITS, TierHits
from tandem.worker.page_tier import PageTier, PrefetchKey


class Prefetches:
    """One scheduler's open prefetches, by request id and attempt. Each is ended once, however many paths end it.

    Attributes:
        has_store: False if no prefetch ever loads a page.
    """

    def __init__(self, tier: PageTier, phase: str) -> None:
        """Args: phase: "prefill" or "decode"."""
        self._tier = tier
        self.has_store = tier.has_store
        self._phase = phase
        self._open: set[tuple[str, int]] = set()

    def begin(self, key: tuple[str, int], token_ids: Sequence[int], namespace: str, priority: int) -> None:
        """Begins a prefetch, unless it is open."""
        if self.has_store and key not in self._open:
            self._open.add(key)
            self._tier.prefetch(self._key(key), token_ids, namespace, priority)

    def is_loading(self, key: tuple[str, int]) -> bool:
        return key in self._open and self._tier.is_loading(self._key(key))

    def end(self, key: tuple[str, int]) -> TierHits:
        """Ends a prefetch and returns its hits; none if it is not open."""
        if key not in self._open:
            return NO_HITS
        self._open.remove(key)
        return self._tier.end(self._key(key))

    def _key(self, key: tuple[str, int]) -> PrefetchKey:
        return (*key, self._phase)
