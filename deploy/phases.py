"""How long each part of a start takes."""

import time


class Phases:
    """Phases one after the other: each ends where the next begins.

    Attributes:
        seconds: by phase, in the order in which they came; a phase that comes again adds to its own.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._name = ""
        self._began = 0.0

    def begin(self, name: str) -> None:
        """Args: name: what stands in brackets after it, such as "(2 of 9)", is progress within one phase."""
        self.end()
        self._name, self._began = name.partition(" (")[0], time.perf_counter()

    def end(self) -> None:
        if self._name:
            self.seconds[self._name] = self.seconds.get(self._name, 0.0) + time.perf_counter() - self._began
        self._name = ""
