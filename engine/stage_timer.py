"""How long each part of a start takes."""

import time


class StageTimer:
    """Stages of a start, one after the other: each ends where the next begins.

    Attributes:
        current: the stage that is under way; "" if none is.
        seconds: by stage, in the order in which they came, of those that have ended; a stage that comes again adds to
            its own.
    """

    def __init__(self) -> None:
        self.current = ""
        self.seconds: dict[str, float] = {}
        self._began = 0.0

    def begin(self, name: str) -> None:
        """Args: name: what stands in brackets after it, such as "(2 of 9)", is progress within one stage."""
        self.end()
        self.current, self._began = name.partition(" (")[0], time.perf_counter()

    def end(self) -> None:
        if self.current:
            self.seconds[self.current] = self.seconds.get(self.current, 0.0) + time.perf_counter() - self._began
        self.current = ""

    def __str__(self) -> str:
        return ", ".join(f"{name} {took:.1f} s" for name, took in self.seconds.items())
