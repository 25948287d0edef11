"""Changes to a serving cluster, in turns that never wait.

Requested changes are made one after the other. One that waits for a node lets others pass; urgent ones begin at once.
"""

import contextlib
import queue
from collections.abc import Callable, Generator

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

    def replaces(self, other: "ChangeJob") -> bool:
        """Returns whether this request makes a waiting one void."""
        return False

    def finish(self, error: str = "", *, is_usage: bool = False) -> None:
        self.error, self.is_usage = error, is_usage
        self.lines.put(None)


class ChangeError(Exception):
    """A change that failed while it was made."""


class Change:
    """A change that is being made. Its steps yield instead of waiting, and raise ChangeError.

    Attributes:
        job: the request.
    """

    def __init__(self, job: ChangeJob, steps: Generator[None, None, None]) -> None:
        self.job = job
        self._steps = steps
        # Set while the change waits for a node. It then undoes its wait if its steps are closed.
        self._may_go_on: Callable[[], bool] | None = None

    def take_turn(self) -> bool:
        """Goes on without waiting. Returns whether it is over."""
        self._may_go_on = None
        try:
            next(self._steps)
        except StopIteration:
            self.job.finish()
        except ChangeError as error:
            self.job.finish(str(error))
        else:
            return False
        return True

    @property
    def is_waiting(self) -> bool:
        return self._may_go_on is not None

    def may_go_on(self) -> bool:
        return self._may_go_on is None or self._may_go_on()

    def withdraw(self, reason: str) -> None:
        """Ends a waiting change."""
        self._steps.close()
        self.job.finish(reason)

    def give_up(self) -> None:
        self.job.finish("the cluster is stopping")


class ChangeQueue:
    """Makes changes on the supervising thread."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[ChangeJob] = queue.SimpleQueue()
        self._current: Change | None = None
        self._waiting: Change | None = None
        self._urgent: list[Change] = []

    def ask(self, job: ChangeJob) -> None:
        self._jobs.put(job)

    def begin(self, change: Change) -> None:
        """Makes an urgent change beside the others. No requested one begins before its end."""
        self._urgent.append(change)

    def take_turn(self, plan: Callable[[ChangeJob], Change]) -> None:
        """Continues changes or begins the next. `plan` raises ValueError or ClusterError for an impossible one."""
        self._urgent = [change for change in self._urgent if not change.take_turn()]
        if self._current is None:
            if self._waiting is not None and self._waiting.may_go_on():
                self._current, self._waiting = self._waiting, None
            elif not self._urgent:
                self._begin_next(plan)
        if self._current is None:
            return
        if self._current.take_turn():
            self._current = None
        elif self._current.is_waiting and self._waiting is None:
            self._current, self._waiting = None, self._current

    def _begin_next(self, plan: Callable[[ChangeJob], Change]) -> None:
        with contextlib.suppress(queue.Empty):
            job = self._jobs.get_nowait()
            if self._waiting is not None and job.replaces(self._waiting.job):
                self._waiting.withdraw("another change of the numbers of workers was requested meanwhile")
                self._waiting = None
            try:
                self._current = plan(job)
            except (ValueError, ClusterError) as error:
                job.finish(str(error), is_usage=True)

    def give_up(self) -> None:
        for change in (self._current, self._waiting, *self._urgent):
            if change is not None:
                change.give_up()
        self._current, self._waiting, self._urgent = None, None, []
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait().finish("the cluster is stopping")
