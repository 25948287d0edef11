"""Earliest plausible end of a running prefill, before which nobody polls for it."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

# Number of recent forward passes in the estimate.
WINDOW = 16
# Share of the shortest recent time, relative to the expected one, after which a forward pass may end.
SHARE = 0.9


@dataclass(slots=True)
class _Pass:
    began: float
    expected_s: float


class PromptPace:
    """Estimates when a launched forward pass without decode steps may end.

    A pass begins at its launch or the previous end, whichever is later. It takes at least SHARE of its expected time,
    times the smallest recent ratio of measured to expected, but at most 1: a higher ratio corrects the expectation of
    later passes already. The device measures, so late notice teaches no later ends.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Measured over expected time.
        self._multiples: deque[float] = deque(maxlen=WINDOW)
        self._in_flight: deque[_Pass] = deque()

    def launched(self, began: float, expected_s: float) -> None:
        """Args: began: start of the launch."""
        self._in_flight.append(_Pass(began, expected_s))

    def ended(self, duration_s: float) -> None:
        """The oldest pass has ended. Args: duration_s: its device time."""
        ended = self._in_flight.popleft()
        end = min(self._clock(), ended.began + duration_s)
        for behind in self._in_flight:
            behind.began = max(behind.began, end)
        if ended.expected_s > 0.0:
            self._multiples.append(duration_s / ended.expected_s)

    def earliest_end(self) -> float:
        """Returns the time from which on to poll for the oldest pass; its start if nothing is known."""
        oldest = self._in_flight[0]
        return oldest.began + SHARE * min(1.0, min(self._multiples, default=0.0)) * oldest.expected_s
