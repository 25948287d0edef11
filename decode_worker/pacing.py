"""Timing of the next decode step: late, to include new requests, but in time for the device."""

import math
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

# Number of recent steps of each kind in the estimates.
WINDOW = 8
# Margin on the longest recent host time.
HOST_FACTOR = 1.2
# Allowance for a thread's late wake-up, in seconds.
WAKE_UP_S = 0.00015
# Share of the shortest recent time after which a step may end.
SHARE = 0.9


@dataclass(slots=True)
class _Step:
    """A step in flight. Attributes: expected_s: its expected duration if mixed, else None."""

    began: float
    expected_s: float | None


class StepPace:
    """Estimates the end of the step in flight and the lead time of the next one.

    A step begins at its launch or the previous step's end, whichever is later. Without prompts it takes the shortest
    recent time; with prompts, its expected time times the smallest recent ratio of measured to expected. Composed too
    early, a step misses late requests; too late, the device idles. Mixed steps may be launched kernel by kernel, which
    takes about as long as a step, so their host times are kept apart.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._durations_s: deque[float] = deque(maxlen=WINDOW)
        # Measured over expected time of mixed steps.
        self._multiples: deque[float] = deque(maxlen=WINDOW)
        # By whether the step has prompts.
        self._host_times_s = {kind: deque[float](maxlen=WINDOW) for kind in (False, True)}
        self._collected_s = deque[float](maxlen=WINDOW)
        self._composing_since = self._launching_since = 0.0
        self._in_flight: deque[_Step] = deque()

    def due(self, *, with_prompts: bool = False) -> float:
        """Returns the time to compose the next step; now if nothing is known.

        Args:
            with_prompts: whether that step has prompts.
        """
        step = self._in_flight[-1]
        lead_s = HOST_FACTOR * max(self._host_times_s[with_prompts], default=math.inf) + WAKE_UP_S
        return step.began + max(0.0, self._least_s(step) - lead_s)

    def earliest_end(self) -> float:
        """Returns the time from which on to poll for the oldest step's end; its start if nothing is known.

        As in PromptPace, a ratio above 1 does not count: the expected time is corrected already.
        """
        oldest, least_s = self._in_flight[0], self._least_s(self._in_flight[0])
        return oldest.began + SHARE * (least_s if oldest.expected_s is None else min(least_s, oldest.expected_s))

    def _least_s(self, step: _Step) -> float:
        if step.expected_s is None:
            return min(self._durations_s, default=0.0)
        return step.expected_s * min(self._multiples, default=0.0)

    def is_due(self, *, with_prompts: bool = False) -> bool:
        return self._clock() >= self.due(with_prompts=with_prompts)

    def composing(self) -> None:
        self._composing_since = self._clock()

    def launching(self) -> None:
        self._launching_since = self._clock()

    def launched(self, expected_s: float | None = None) -> None:
        """The device may have been running the step since its launch began.

        Args:
            expected_s: expected duration of a mixed step; None without prompts.
        """
        self._in_flight.append(_Step(self._launching_since, expected_s))
        self._host_times_s[expected_s is not None].append(self._clock() - self._composing_since)

    def collected(self, seconds: float) -> None:
        """The host has handled a step's tokens. Args: seconds: since it knew them."""
        self._collected_s.append(seconds)

    @property
    def lost_s(self) -> float:
        """Host time of a step without prompts, which the device idles if the step does not overlap."""
        return sum(_mean(times_s) for times_s in (self._host_times_s[False], self._collected_s))

    def ended(self, duration_s: float, *, was_running: bool) -> None:
        """The oldest step has ended and the next one has begun.

        Args:
            duration_s: device time of the step.
            was_running: True if it ended just now; False if it ended unnoticed before.
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


def _mean(times_s: Collection[float]) -> float:
    return sum(times_s) / len(times_s) if times_s else 0.0
