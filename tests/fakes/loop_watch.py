"""The longest turn of an event loop."""

import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any

TICK_S = 0.0005
# Work and its CPU time on the host for which limits are stated.
YARDSTICK_ROUNDS = 40_000
YARDSTICK_S = 0.0021


class LoopWatch:
    """Measures inside its context, without garbage collections: a test's heap is larger than a router's.

    Attributes:
        longest_cpu_s: longest CPU time of the loop's thread between two ticks; a busy machine hardly changes it.
        longest_gap_s: longest time between two ticks.
    """

    def __init__(self) -> None:
        self.longest_cpu_s = self.longest_gap_s = 0.0

    async def __aenter__(self) -> "LoopWatch":
        gc.collect()
        gc.disable()
        self._task = asyncio.create_task(self._watch())
        await asyncio.sleep(10 * TICK_S)
        self.longest_cpu_s = self.longest_gap_s = 0.0
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.sleep(2 * TICK_S)
        gc.enable()
        self._task.cancel()

    def __str__(self) -> str:
        return f"loop busy for {1e3 * self.longest_cpu_s:.1f} ms, gap {1e3 * self.longest_gap_s:.1f} ms"

    async def _watch(self) -> None:
        cpu_s, now_s = time.thread_time(), time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            self.longest_cpu_s = max(self.longest_cpu_s, time.thread_time() - cpu_s)
            self.longest_gap_s = max(self.longest_gap_s, time.monotonic() - now_s)
            cpu_s, now_s = time.thread_time(), time.monotonic()


class SlowTurnError(AssertionError):
    pass


def check_turn(watch: LoopWatch, limit_s: float) -> None:
    """Args: limit_s: allowed on a host that is no slower than the yardstick; a slower one is allowed more."""
    slowness = max(1.0, yardstick_s() / YARDSTICK_S)
    if watch.longest_cpu_s >= limit_s * slowness:
        raise SlowTurnError(f"{watch}, on a host {slowness:.1f} times slower than the yardstick")


def yardstick_s() -> float:
    """Returns the median CPU time of a fixed amount of work: other work on the host's cores lengthens it too."""
    times = []
    for _ in range(5):
        began = time.thread_time()
        counts: dict[int, int] = {}
        for number in range(YARDSTICK_ROUNDS):
            counts[number & 255] = number
        times.append(time.thread_time() - began)
    return statistics.median(times)


def best_of_three(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a scenario up to three times, because other work on the host can double a turn's CPU time."""
    for is_last in (False, False, True):
        try:
            asyncio.run(scenario())
            return
        except SlowTurnError:
            if is_last:
                raise
