from collections.abc import Callable

# Share of a turn for pages that are loaded, and the engine thread's time to hash, start and enter one, in seconds.
SHARE, PAGE_S = 1 / 8, 1e-5
# Longest turn that counts, in seconds: an idle thread sleeps for longer, and delays whatever wakes it.
MAX_TURN_S = 0.04


class TurnBudget:
    """Pages that a turn of the engine thread may load, by the length of the turn before it.

    A turn is long because it waits for a forward pass. Work that takes a small part of it is done behind that pass.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()

    def begin(self) -> int:
        """Begins a turn. Returns its pages."""
        now = self._clock()
        turn_s, self._began = now - self._began, now
        return int(min(turn_s, MAX_TURN_S) * SHARE / PAGE_S)
