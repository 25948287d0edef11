"""Processes of a benchmark's own, whose CPU time and memory can be told apart."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
# Linux names the clock of a process's user and system time together by this, in one number with the pid.
_CPU_CLOCK = 2


class Child:
    """A process that answers one question at a time. Use as a context manager, which ends it.

    Attributes: pid: of the process.
    """

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        """Args: target: called there with its end of a pipe and `args`; returns when `questions` of it end."""
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
        """Asks without waiting; `answer` waits."""
        self._pipe.send(question)

    def ask(self, question: Any, timeout_s: float = START_TIMEOUT_S) -> Any:
        """As `answer`."""
        self.send(question)
        return self.answer(timeout_s)


def cpu_s(pid: int) -> float:
    """User and system time of a process and all its threads so far, those that have ended too, in seconds.

    Raises OSError if there is no such process.
    """
    # /proc and psutil count in ticks of 10 ms, more than a short run takes; the kernel's clock of a process counts in
    # nanoseconds. Its number is what clock_getcpuclockid(3) makes of the pid, which Python does not offer.
    return time.clock_gettime(~pid << 3 | _CPU_CLOCK)


def rss_mib(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 2**20


def questions(pipe: Connection) -> Iterator[Any]:
    """What the parent asks, until it ends or closes the pipe."""
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return
