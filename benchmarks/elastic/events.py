"""Virtual time: a queue of calls, run in order."""

import heapq
import itertools
from collections.abc import Callable


class Call:
    """A due call. Attributes: is_off: it must not run any more."""

    __slots__ = ("_run", "is_off")

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self.is_off = False

    def run(self) -> None:
        if not self.is_off:
            self._run()


class Events:
    """Attributes: now: seconds since the beginning."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Call]] = []
        self._numbers = itertools.count()

    def clock(self) -> float:
        return self.now

    def at(self, moment: float, run: Callable[[], None]) -> Call:
        call = Call(run)
        heapq.heappush(self._calls, (max(moment, self.now), next(self._numbers), call))
        return call

    def after(self, seconds: float, run: Callable[[], None]) -> Call:
        return self.at(self.now + seconds, run)

    def every(self, seconds: float, run: Callable[[], None], first: float = 0.0) -> None:
        """Repeats a call for good. Args: first: moment of the first call."""

        def again() -> None:
            run()
            self.after(seconds, again)

        self.at(first, again)

    def run_until(self, end: float) -> None:
        calls = self._calls
        while calls and calls[0][0] <= end:
            self.now, _, call = heapq.heappop(calls)
            call.run()
        self.now = max(self.now, end)
