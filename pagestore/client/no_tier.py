from collections.abc import Sequence

from tandem.pagestore.client.base import PageTier, PrefetchKey, TierHits
from tandem.worker.events import Event


class NoTier(PageTier):
    """The tier of a worker without a page store."""

    def prefetch(self, key: PrefetchKey, token_ids: Sequence[int], namespace: str, priority: int = 0) -> None:
        pass

    def is_loading(self, key: PrefetchKey) -> bool:
        return False

    def end(self, key: PrefetchKey) -> TierHits:
        return TierHits()

    def yields_pages(self) -> bool:
        return False

    def receive(self, event: Event) -> None:
        pass

    def settle(self) -> bool:
        return False

    def next_deadline(self) -> float | None:
        return None

    def reset(self) -> None:
        pass
