"""Changes to a serving cluster, made one after the other, in turns that never wait."""

import contextlib
import queue
from collections.abc import Callable, Iterator

from tandem.deploy.errors import ClusterError


class ChangeJob:
    """A requested change and its outcome. Methods may be called from any thread.

    Attributes:
        lines: progress messages; None: the end.
        is_usage: the error is in the request.
    """

    def __init__(self) -> None:
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.error = ""
        self.is_usage = False

    def next_line(self, timeout_s: float) -> str | None:
        """Returns the next message; "" after timeout_s; None at the end."""
        try:
            return self.lines.get(timeout=timeout_s)
        except queue.Empty:
            return ""

    def say_left(self, label: str, num_left: int, remaining_s: float) -> None:
        self.lines.put(f"{label}: requests left: {num_left}; waiting {remaining_s:.0f} s at most")

    def finish(self, error: str = "", *, is_usage: bool = False) -> None:
        self.error, self.is_usage = error, is_usage
        self.lines.put(None)


class ChangeError(Exception):
    """A change that failed while it was made."""


class Change:
    """A change that is being made. Its steps yield instead of waiting, and raise ChangeError."""

    def __init__(self, job: ChangeJob, steps: Iterator[None]) -> None:
        self._job = job
        self._steps = steps

    def take_turn(self) -> bool:
        """Goes on without waiting. Returns whether it is over."""
        try:
            next(self._steps)
        except StopIteration:
            self._job.finish()
        except ChangeError as error:
            self._job.finish(str(error))
        else:
            return False
        return True

    def give_up(self) -> None:
        self._job.finish("the cluster is stopping")


class ChangeQueue:
    """Makes changes one after the other, on the supervising thread."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[ChangeJob] = queue.SimpleQueue()
        self._current: Change | None = None

    def ask(self, job: ChangeJob) -> None:
        self._jobs.put(job)

    def take_turn(self, plan: Callable[[ChangeJob], Change]) -> None:
        """Continues a change or begins the next. `plan` raises ValueError or ClusterError for an impossible one."""
        if self._current is None:
            with contextlib.suppress(queue.Empty):
                job = self._jobs.get_nowait()
                try:
                    self._current = plan(job)
                except (ValueError, ClusterError) as error:
                    job.finish(str(error), is_usage=True)
        if self._current is not None and self._current.take_turn():
            self._current = None

    def give_up(self) -> None:
        if self._current is not None:
            self._current.give_up()
            self._current = None
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait().finish("the cluster is stopping")
