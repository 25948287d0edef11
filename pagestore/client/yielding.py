from collections.abc import Callable

from tandem.engine.kvcache.cache_manager import CacheManager

# Limit on the rest that requests get to ask for pages, in seconds.
REST_S = 0.05


class Yielding:
    """Leaves the pool to the requests when one gets no pages while copies hold some.

    Then no copy starts until all have ended and a request has asked for pages again.
    """

    def __init__(self, cache: CacheManager, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._clock = clock
        self._is_yielding = False
        self._num_refusals = cache.num_refusals
        # Whether copies held pages when the schedulers had their turn.
        self._has_held = False
        # Time since which no copy holds pages, and attempts to get pages until then.
        self._rests_since: float | None = None
        self._num_attempts = 0

    @property
    def is_yielding(self) -> bool:
        return self._is_yielding

    def begin(self) -> None:
        self._is_yielding = True

    def may_start(self, num_held_pages: int) -> bool:
        """Returns whether copies may start. Called once a turn, after ended copies let their pages go."""
        if self._has_held and self._cache.num_refusals != self._num_refusals:
            self._is_yielding = True
        if not self._is_yielding or num_held_pages:
            return not self._is_yielding
        now = self._clock()
        if self._rests_since is None:
            self._rests_since, self._num_attempts = now, self._cache.num_attempts
        elif self._cache.num_attempts != self._num_attempts or now >= self._rests_since + REST_S:
            self._rests_since, self._is_yielding = None, False
        return not self._is_yielding

    def end_turn(self, num_held_pages: int) -> None:
        """Takes the state before the schedulers' turn: a load's own attempts do not count."""
        self._has_held = num_held_pages > 0
        self._num_refusals = self._cache.num_refusals
