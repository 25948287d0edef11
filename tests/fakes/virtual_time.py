"""An event loop whose clock jumps to the next timer when it has no other work."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

# Duration of a loop round, so that polling code sees the clock move.
ROUND_S = 50e-6


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop for coroutines that wait for timers and each other, not for sockets or threads."""

    def __init__(self) -> None:
        super().__init__(_PassingTime(self))
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Block the loop for `seconds` of virtual time."""
        self._now += seconds


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """As `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def now() -> float:
    return asyncio.get_running_loop().time()


def hold_up(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.advance(seconds)


class _PassingTime(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Raises: RuntimeError: no timer is set, so the wait would never end."""
        if timeout is None:
            raise RuntimeError("all wait for each other, or for a socket or a thread")
        self._loop.advance(max(timeout, ROUND_S))
        return super().select(0)
