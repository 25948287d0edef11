"""Followers that stand still count as a worker that stands still."""

from collections.abc import Callable


class GroupSteps:
    """Counts a worker's steps as far as all ranks move."""

    def __init__(self, num_steps: Callable[[], int], beats: Callable[[], list[int]]) -> None:
        """
        Args:
            num_steps: the leader's steps.
            beats: of the followers; each rises at least every 0.1 s.
        """
        self._num_steps = num_steps
        self._beats = beats
        self._last_beats = beats()
        self._last = num_steps()

    def count(self) -> int:
        """Returns the leader's steps, or the last count while a follower has not moved since. Call it at the interval
        of heartbeats."""
        beats = self._beats()
        if all(beat != last for beat, last in zip(beats, self._last_beats, strict=True)):
            self._last_beats, self._last = beats, self._num_steps()
        return self._last
