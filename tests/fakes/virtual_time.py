"""An event loop whose time passes only while nothing is left to do: waits take none, and nothing else does."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

# What a round of the loop takes, so that who looks at the clock again and again sees it move.
ROUND_S = 50e-6


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For coroutines that wait for timers and for each other, not for sockets or threads."""

    def __init__(self) -> None:
        super().__init__(_PassingTime(self))
        self._now = 0.0

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Somebody holds up the loop for so long."""
        self._now += seconds


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """As `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def now() -> float:
    """The running loop's time, in seconds."""
    return asyncio.get_running_loop().time()


def hold_up(seconds: float) -> None:
    """Takes so much of the running loop's time."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.advance(seconds)


class _PassingTime(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Raises: RuntimeError: nobody waits for a time, and so for ever."""
        if timeout is None:
            raise RuntimeError("all wait for each other, or for a socket or a thread")
        self._loop.advance(max(timeout, ROUND_S))
        return super().select(0)
