"""Virtual time: what happens next, happens at once."""

import heapq
import itertools
from collections.abc import Callable


class EventQueue:
    """Attributes: now: in seconds; what is to happen at the same moment happens in the order in which it was said."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def clock(self) -> float:
        return self.now

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), do))

    def run(self) -> None:
        """Returns when nothing more is to happen."""
        while self._events:
            self.now, _, do = heapq.heappop(self._events)
            do()
