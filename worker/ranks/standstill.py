"""Detects followers that hang, which stop the worker's step count, and stopped followers, which silence the worker."""

import time
from collections.abc import Callable

# A busy follower's thread may run this late.
SILENCE_S = 1.0
# Interval between pulses of a follower, in seconds.
PULSE_INTERVAL_S = 0.1
# A rank waits longer for another than the worker may stand still: the watch of steps names the cause.
WAIT_FACTOR = 1.5


class GroupSteps:
    """Counts a worker's steps. The count stops while a follower hangs."""

    def __init__(self, num_steps: Callable[[], int], beats: Callable[[], list[int]]) -> None:
        """
        Args:
            num_steps: the leader's steps.
            beats: of the followers' threads; each rises at least every 0.1 s.
        """
        self._num_steps = num_steps
        self._beats = beats
        self._last_beats = beats()
        self._last = num_steps()

    def count(self) -> int:
        """Returns the leader's steps, or the last count while a thread of a follower has not moved since. Call it at
        the interval of heartbeats."""
        beats = self._beats()
        if all(beat != last for beat, last in zip(beats, self._last_beats, strict=True)):
            self._last_beats, self._last = beats, self._num_steps()
        return self._last


class GroupPulse:
    """Tells whether the processes of all followers run."""

    def __init__(self, pulses: Callable[[], list[int]], clock: Callable[[], float] = time.monotonic) -> None:
        """Args: pulses: of the followers; each rises every PULSE_INTERVAL_S."""
        self._pulses = pulses
        self._clock = clock
        self._last = pulses()
        self._moved_at = [clock()] * len(self._last)

    def is_silent(self) -> bool:
        """Returns whether a follower has not run for SILENCE_S. Call it more often than that."""
        now, pulses = self._clock(), self._pulses()
        for i, (pulse, last) in enumerate(zip(pulses, self._last, strict=True)):
            if pulse != last:
                self._moved_at[i] = now
        self._last = pulses
        return now - min(self._moved_at) > SILENCE_S
