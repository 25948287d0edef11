"""When the next step is composed while one is running: late, so that a request that arrives meanwhile is in it, and
early enough for the device not to wait."""

from collections import deque
from collections.abc import Callable

# The estimates look back on so many steps.
WINDOW = 8
# The longest time of late to compose a step is multiplied by this: a little slower must not make the device wait.
HOST_FACTOR = 1.2
# A thread may wake up this much later than it asked to, and the next step must be composed in time all the same.
WAKE_UP_S = 0.00015


class StepPace:
    """Estimates when the step in flight will end, and how long before that the next one must be begun.

    A step begins when it is launched or when the one before it ends, whichever is later. It takes as long as the
    shortest of late: composed too early, the next step only misses who comes last; too late, the device waits.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Args: clock: seconds."""
        self._clock = clock
        self._durations_s: deque[float] = deque(maxlen=WINDOW)
        self._host_times_s: deque[float] = deque(maxlen=WINDOW)
        self._composing_since = 0.0
        self._began = 0.0

    @property
    def due(self) -> float:
        """When, on the clock, to compose the step after the one in flight; at once while nothing is known yet."""
        lead_s = HOST_FACTOR * max(self._host_times_s, default=0.0) + WAKE_UP_S
        return self._began + max(0.0, min(self._durations_s, default=0.0) - lead_s)

    @property
    def is_due(self) -> bool:
        return self._clock() >= self.due

    def composing(self) -> None:
        """The next step is being composed from now on."""
        self._composing_since = self._clock()

    def launched(self, *, is_mixed: bool = False) -> None:
        """It has been launched: it begins now, unless another one is running still.

        Args:
            is_mixed: with prompts in the same forward, which says nothing of how long steps without any take.
        """
        self._began = self._clock()
        if not is_mixed:
            self._host_times_s.append(self._began - self._composing_since)

    def ended(self, duration_s: float, *, is_mixed: bool = False) -> None:
        """A step has just been seen to end: what is in flight begins now. Args: duration_s: of the step that ended."""
        self._began = self._clock()
        if not is_mixed:
            self._durations_s.append(duration_s)
