"""The tier below a worker's pool, as schedulers see it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tandem.messages import TierHits
from tandem.worker.events import Event

# Request id, attempt number, and "prefill" or "decode": a worker of role both may have both.
PrefetchKey = tuple[str, int, str]


class PageTier(ABC):
    """Copies pages between the pool and the node's page store. Called only by the engine thread.

    Loading is a prefetch into the radix tree: loaded pages are found there by the next match, and a failure is a miss.
    So no caller waits for a result, and nothing else knows of loads.

    Attributes:
        has_store: False if there is never a page to load.
    """

    has_store = True

    @abstractmethod
    def prefetch(self, key: PrefetchKey, token_ids: Sequence[int], namespace: str, priority: int = 0) -> None:
        """Begins to load the stored pages that continue the cached prefix of `token_ids`, where that is faster than
        computing them. Every call is followed by one `end`."""

    @abstractmethod
    def is_loading(self, key: PrefetchKey) -> bool:
        """Returns whether a request gains by waiting: pages are coming, and computing them would not be done sooner."""

    @abstractmethod
    def end(self, key: PrefetchKey) -> TierHits:
        """Ends a prefetch: its request starts, moves or ends. Copies in flight end on their own. Returns its hits; none
        for an unknown key."""

    @abstractmethod
    def yields_pages(self) -> bool:
        """Called when a running request cannot grow. Starts no copies for now. Returns whether copies still hold pages
        that the pool will get back, which the caller should wait for."""

    @abstractmethod
    def load_token_s(self) -> tuple[float, ...]:
        """Returns the seconds to load a token from memory, disk and peers, for one request alone. 0.0: not known; ():
        there is no store."""

    @abstractmethod
    def receive(self, event: Event) -> None:
        """Takes an event of the store's session (tandem.pagestore.client.events); ignores others."""

    @abstractmethod
    def settle(self) -> bool:
        """Handles ended copies and starts others, within a bounded time. Called in each turn of the engine thread.
        Returns whether pages were loaded."""

    @abstractmethod
    def next_deadline(self) -> float | None:
        """Returns the time on the scheduler's clock of the next `settle` due without events."""

    @abstractmethod
    def reset(self) -> None:
        """Purges the store, and keeps all pages of this moment out of it."""

    @abstractmethod
    def check_integrity(self) -> str:
        """Returns the first violation of the accounting of copies, or ""."""


class NoTier(PageTier):
    """The tier of a worker without a page store."""

    has_store = False

    def prefetch(self, key: PrefetchKey, token_ids: Sequence[int], namespace: str, priority: int = 0) -> None:
        pass

    def is_loading(self, key: PrefetchKey) -> bool:
        return False

    def end(self, key: PrefetchKey) -> TierHits:
        return TierHits()

    def yields_pages(self) -> bool:
        return False

    def load_token_s(self) -> tuple[float, ...]:
        return ()

    def receive(self, event: Event) -> None:
        pass

    def settle(self) -> bool:
        return False

    def next_deadline(self) -> float | None:
        return None

    def reset(self) -> None:
        pass

    def check_integrity(self) -> str:
        return ""
