"""When the next step is composed while one is running: late, so that a request that arrives meanwhile is in it, and
early enough for the device not to wait."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

# The estimates look back on so many steps of a kind.
WINDOW = 8
# The longest time of late to compose a step is multiplied by this: a little slower must not make the device wait.
HOST_FACTOR = 1.2
# A thread may wake up this much later than it asked to, and the next step must be composed in time all the same.
WAKE_UP_S = 0.00015


@dataclass(slots=True)
class _Step:
    """One that has been launched and not been seen to end.

    Attributes:
        began: on the clock.
        expected_s: what it takes, if there are prompts in it.
    """

    began: float
    expected_s: float | None


class StepPace:
    """Estimates when the step in flight will end, and how long before that the next one must be begun.

    A step begins when its launch does or when the one before it ends, whichever is later. One without prompts takes as
    long as the shortest of late. Those with prompts are of all sizes: one takes what is expected of it, or as much less
    as any of late. Composed too early, the next step only misses who comes last; too late, the device waits.

    How long the host takes is told apart by whether there are prompts too. Such a step may be launched kernel by
    kernel, which takes as long as steps do: then the next one is begun that much earlier.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Args: clock: seconds."""
        self._clock = clock
        self._durations_s: deque[float] = deque(maxlen=WINDOW)
        # Of steps with prompts, as multiples of what was expected.
        self._multiples: deque[float] = deque(maxlen=WINDOW)
        # By whether there are prompts.
        self._host_times_s = {kind: deque[float](maxlen=WINDOW) for kind in (False, True)}
        self._composing_since = self._launching_since = 0.0
        self._in_flight: deque[_Step] = deque()

    def due(self, *, with_prompts: bool = False) -> float:
        """When, on the clock, to compose the step after the one in flight; at once while nothing is known yet. Args:
        with_prompts: whether that step is to have some."""
        step = self._in_flight[-1]
        if step.expected_s is None:
            takes_s = min(self._durations_s, default=0.0)
        else:
            takes_s = step.expected_s * min(self._multiples, default=0.0)
        lead_s = HOST_FACTOR * max(self._host_times_s[with_prompts], default=math.inf) + WAKE_UP_S
        return step.began + max(0.0, takes_s - lead_s)

    def is_due(self, *, with_prompts: bool = False) -> bool:
        return self._clock() >= self.due(with_prompts=with_prompts)

    def composing(self) -> None:
        """The next step is being composed from now on."""
        self._composing_since = self._clock()

    def launching(self) -> None:
        """It has been composed, and is being launched from now on."""
        self._launching_since = self._clock()

    def launched(self, expected_s: float | None = None) -> None:
        """It has been launched. The device may be computing it since the launch began.

        Args:
            expected_s: what it takes if there are prompts in the same forward; None: there are none.
        """
        self._in_flight.append(_Step(self._launching_since, expected_s))
        self._host_times_s[expected_s is not None].append(self._clock() - self._composing_since)

    def ended(self, duration_s: float, *, was_running: bool) -> None:
        """The step that was launched first has ended: the one behind it, if there is one, has begun then.

        Args:
            duration_s: that the device took.
            was_running: whether it ended just now; otherwise some time ago, while the host did something else.
        """
        ended, end = self._in_flight.popleft(), self._clock()
        if not was_running:
            end = min(end, ended.began + duration_s)
        for behind in self._in_flight:
            behind.began = max(behind.began, end)
        if ended.expected_s is None:
            self._durations_s.append(duration_s)
        elif ended.expected_s > 0.0:
            self._multiples.append(duration_s / ended.expected_s)
