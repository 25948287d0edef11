"""Changes to a serving cluster, in turns that never wait.

Requested changes are made one after the other. One that waits for a node lets others pass; urgent ones begin at once.
"""

import contextlib
import queue
from collections.abc import Callable, Generator, Iterator

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

    def replaces(self, other: "ChangeJob") -> bool:
        """Returns whether this request makes a waiting one void."""
        return False

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
        # Set while the change waits for a node.
        self._may_go_on: Callable[[], bool] | None = None

    @property
    def job(self) -> ChangeJob:
        return self._job

    @property
    def error(self) -> str:
        """Why the change failed; "" before its end, and if it succeeded."""
        return self._job.error

    def take_turn(self) -> bool:
        """Goes on without waiting. Returns whether it is over."""
        self._may_go_on = None
        try:
            next(self._steps)
        except StopIteration:
            self._job.finish()
        except ChangeError as error:
            self._job.finish(str(error))
        else:
            return False
        return True

    @property
    def is_waiting(self) -> bool:
        return self._may_go_on is not None

    def may_go_on(self) -> bool:
        return self._may_go_on is None or self._may_go_on()

    def wait(self, may_go_on: Callable[[], bool]) -> None:
        """Called by the steps before they yield: nothing but closing them undoes what they have begun."""
        self._may_go_on = may_go_on

    def withdraw(self, reason: str) -> None:
        """Ends a waiting change."""
        assert self.is_waiting and isinstance(self._steps, Generator)
        self._steps.close()
        self._job.finish(reason)

    def drop(self) -> None:
        """Ends a change whose effects another one undoes. What it has only asked for is taken back at once."""
        if isinstance(self._steps, Generator):
            self._steps.close()

    def give_up(self) -> None:
        self._job.finish(STOPPING)


class ChangeQueue:
    """Makes changes on the supervising thread."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[ChangeJob] = queue.SimpleQueue()
        self._current: Change | None = None
        self._next: ChangeJob | None = None
        self._waiting: Change | None = None
        self._urgent: list[Change] = []

    @property
    def job(self) -> ChangeJob | None:
        """The job that waits for a node, or else is done or is next."""
        change = self._waiting or self._current
        return change.job if change is not None else self._next

    def begin(self, change: Change) -> None:
        """Makes an urgent change beside the others. No requested one begins before its end."""
        self._urgent.append(change)

    def ask(self, job: ChangeJob) -> None:
        self._jobs.put(job)

    def take_turn(
        self, plan: Callable[[ChangeJob], Change], may_begin: Callable[[ChangeJob], bool] = lambda _: True
    ) -> None:
        """Continues a change or begins the next.

        Args:
            plan: plans a change as if the waiting one that it replaces were withdrawn. Raises ValueError or
                ClusterError for an impossible change; the waiting one stays then.
            may_begin: False: the job waits.
        """
        self._urgent = [change for change in self._urgent if not change.take_turn()]
        if self._current is None and self._waiting is not None and self._waiting.may_go_on():
            self._current, self._waiting = self._waiting, None
        elif self._current is None and not self._urgent:
            self._begin_next(plan, may_begin)
        if self._current is None:
            return
        if self._current.take_turn():
            self._current = None
        elif self._current.is_waiting:
            self._waiting, self._current = self._current, None

    def _begin_next(self, plan: Callable[[ChangeJob], Change], may_begin: Callable[[ChangeJob], bool]) -> None:
        if self._next is None:
            with contextlib.suppress(queue.Empty):
                self._next = self._jobs.get_nowait()
        if self._next is None or not may_begin(self._next):
            return
        job, self._next = self._next, None
        try:
            self._current = plan(job)
        except (ValueError, ClusterError) as error:
            job.finish(str(error), is_usage=True)
            return
        if self._waiting is not None and job.replaces(self._waiting.job):
            self._waiting.withdraw("another change of the numbers of processes was requested meanwhile")
            self._waiting = None

    def give_up(self) -> None:
        for change in (self._current, self._waiting, *self._urgent):
            if change is not None:
                change.give_up()
        if self._next is not None:
            self._next.finish(STOPPING)
        self._current, self._waiting, self._urgent, self._next = None, None, [], None
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait().finish(STOPPING)
