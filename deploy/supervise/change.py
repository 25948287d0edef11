"""Changes to a serving cluster, made one after the other, in turns that never wait."""

import contextlib
import queue
from collections.abc import Callable, Iterator

from tandem.deploy.errors import ClusterError

STOPPING = "the cluster is stopping"


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

    @property
    def error(self) -> str:
        """Why the change failed; "" before its end, and if it succeeded."""
        return self._job.error

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
        self._job.finish(STOPPING)


class ChangeQueue:
    """Makes changes one after the other, on the supervising thread."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[ChangeJob] = queue.SimpleQueue()
        self._current: Change | None = None
        self._job: ChangeJob | None = None

    @property
    def job(self) -> ChangeJob | None:
        """The job that is done, or is next."""
        return self._job

    def ask(self, job: ChangeJob) -> None:
        self._jobs.put(job)

    def take_turn(
        self, plan: Callable[[ChangeJob], Change], may_begin: Callable[[ChangeJob], bool] = lambda _: True
    ) -> None:
        """Continues a change or begins the next.

        Args:
            plan: raises ValueError or ClusterError for an impossible change.
            may_begin: False: the job waits.
        """
        if self._job is None:
            with contextlib.suppress(queue.Empty):
                self._job = self._jobs.get_nowait()
        if self._job is None:
            return
        if self._current is None and may_begin(self._job):
            try:
                self._current = plan(self._job)
            except (ValueError, ClusterError) as error:
                self._job.finish(str(error), is_usage=True)
                self._job = None
        if self._current is not None and self._current.take_turn():
            self._current = self._job = None

    def give_up(self) -> None:
        if self._current is not None:
            self._current.give_up()
        elif self._job is not None:
            self._job.finish(STOPPING)
        self._current = self._job = None
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait().finish(STOPPING)
