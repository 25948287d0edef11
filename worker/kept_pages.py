"""Pages kept locked for the next attempt of a moving stream."""

from collections.abc import Callable

from tandem.engine.kvcache.cache_manager import CacheManager, PageHandle
from tandem.request_ids import router_of

# Time that the next attempt has to come, in seconds: its router answers the give-back at once.
KEEP_S = 2.0


class KeptPages:
    """At most one handle a request. The next attempt takes its pages over in one act with `let_go`. Without one, they
    are let go after a time."""

    def __init__(self, cache: CacheManager, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._clock = clock
        # In order of their ends.
        self._kept: dict[str, tuple[PageHandle, float]] = {}

    def keep(self, request_id: str, handle: PageHandle) -> None:
        """Takes over a handle that no copy uses."""
        self.let_go(request_id)
        self._kept[request_id] = handle, self._clock() + KEEP_S

    def let_go(self, request_id: str) -> bool:
        """Releases a request's pages: those in the tree stay cached. Returns whether there were any."""
        handle, _ = self._kept.pop(request_id, (None, 0.0))
        if handle is not None:
            self._cache.release_pages(handle)
        return handle is not None

    def let_go_overdue(self) -> None:
        now = self._clock()
        for request_id in [request_id for request_id, (_, until) in self._kept.items() if now >= until]:
            self.let_go(request_id)

    def let_go_all_of(self, router: str) -> None:
        for request_id in list(self._kept):
            if router_of(request_id) == router:
                self.let_go(request_id)

    def next_deadline(self) -> float | None:
        return next((until for _, until in self._kept.values()), None)
