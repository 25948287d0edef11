import time


class StageTimer:
    """Times consecutive stages: each ends where the next begins.

    Attributes:
        seconds: duration of each ended stage, in order of first appearance; repeated stages add up.
    """

    def __init__(self) -> None:
        self.current = ""
        self.seconds: dict[str, float] = {}
        self._began = 0.0

    def begin(self, name: str) -> None:
        """A suffix of the name in parentheses, "(2 of 9)", is progress within one stage."""
        self.end()
        self.current, self._began = name.partition(" (")[0], time.perf_counter()

    def end(self) -> None:
        if self.current:
            self.seconds[self.current] = self.seconds.get(self.current, 0.0) + time.perf_counter() - self._began
        self.current = ""

    def __str__(self) -> str:
        return ", ".join(f"{name} {took:.1f} s" for name, took in self.seconds.items())
