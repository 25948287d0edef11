"""Child processes of a benchmark, with separate CPU time and memory."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
# Linux: CPUCLOCK_SCHED, the low bits of a process's CPU clock id.
_CPU_CLOCK = 2


class Child:
    """A process that answers one question at a time. Use as a context manager."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        """Args: target: called in the child with a pipe and `args`; returns when `questions(pipe)` ends."""
        context = multiprocessing.get_context("spawn")
        self._pipe, its_end = context.Pipe()
        self._process = context.Process(target=target, args=(its_end, *args), daemon=True)
        self._process.start()
        its_end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()

    def answer(self, timeout_s: float = START_TIMEOUT_S) -> Any:
        """Raises TimeoutError, or EOFError if the process has died."""
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        return self._pipe.recv()

    def send(self, question: Any) -> None:
        self._pipe.send(question)

    def ask(self, question: Any, timeout_s: float = START_TIMEOUT_S) -> Any:
        self.send(question)
        return self.answer(timeout_s)


def cpu_s(pid: int) -> float:
    """Return a process's user and system time in seconds, including ended threads. Raises OSError."""
    # /proc and psutil count ticks of 10 ms. This is the clock id of clock_getcpuclockid(3), which Python lacks.
    return time.clock_gettime(~pid << 3 | _CPU_CLOCK)


def rss_mib(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 2**20


def questions(pipe: Connection) -> Iterator[Any]:
    """Yield the parent's questions until the pipe closes."""
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return
