"""The thread that alone touches pages, caches and tensors."""

import collections
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from tandem.engine.kvcache.cache_changes import CacheChanges
from tandem.lifecycle import now_ns
from tandem.messages import ReceiverMessage, SenderMessage, WorkerMessage, WorkerStats
from tandem.recording import INBOX, Recorder
from tandem.timer_slack import sleep_exactly
from tandem.worker.base import Outbox, Scheduler
from tandem.worker.events import Event, Inspect, StartRecording, StopRecording

logger = logging.getLogger(__name__)

# An idle loop turns this often, so that its step counter proves that it lives.
IDLE_TURN_S = 0.1
# What has changed in the cache is passed on as often, so that a page costs little.
CHANGES_INTERVAL_S = 0.1


@dataclass(slots=True)
class Outgoing:
    """What a scheduler has to say.

    Attributes:
        to_links: messages by epoch, in order.
        closed_links: epochs to end, with the reason.
        cache_changes: which pages have come into the cache and gone, where that is due.
    """

    to_router: list[WorkerMessage]
    to_links: dict[str, list[SenderMessage | ReceiverMessage]]
    closed_links: dict[str, str]
    cache_changes: CacheChanges | None = None


class StepOutbox(Outbox):
    """Collects what a scheduler says."""

    def __init__(self, deliver: Callable[[Outgoing], None]) -> None:
        self._deliver = deliver
        self._outgoing = Outgoing([], {}, {})

    def to_router(self, message: WorkerMessage) -> None:
        self._outgoing.to_router.append(message)

    def to_link(self, epoch: str, message: SenderMessage | ReceiverMessage) -> None:
        self._outgoing.to_links.setdefault(epoch, []).append(message)

    def close_link(self, epoch: str, reason: str) -> None:
        self._outgoing.closed_links[epoch] = reason

    def pass_on_changes(self, changes: CacheChanges) -> None:
        """Tells those who keep an account of the cache."""
        self._outgoing.cache_changes = changes

    def flush(self) -> bool:
        outgoing = self._outgoing
        if outgoing.to_router or outgoing.to_links or outgoing.closed_links or outgoing.cache_changes is not None:
            self._outgoing = Outgoing([], {}, {})
            self._deliver(outgoing)
            return True
        return False


class EngineThread:
    """Runs a scheduler's loop: take events, step, pass on what was said."""

    def __init__(
        self,
        build: Callable[[Outbox], Scheduler],
        deliver: Callable[[Outgoing], None],
        on_crash: Callable[[BaseException], None],
        recorder: Recorder | None = None,
    ) -> None:
        """
        Args:
            build: loads whatever the scheduler needs and makes it; runs on the thread.
            deliver: passes a step's messages on; called on the thread and must not block.
            on_crash: called on the thread when the loop ends by an exception.
            recorder: of what the thread does; None: nobody can ask for that.
        """
        self._build = build
        self._on_crash = on_crash
        self._recorder = recorder or Recorder()
        self._outbox = StepOutbox(deliver)
        # Appending and popping at either end are atomic: no lock is needed.
        self._inbox: collections.deque[Event] = collections.deque()
        self._wake = threading.Event()
        # Since when the oldest event waits, and when the inbox was last empty, in nanoseconds since the epoch; kept
        # while somebody records.
        self._posted_ns = self._emptied_ns = 0
        self._changes_due = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._built: Future[Scheduler] = Future()
        # Other threads read these: an int and an immutable value, which are replaced whole.
        self.num_steps = 0
        self.latest_stats = WorkerStats()

    def start(self) -> None:
        self._thread.start()

    def wait_built(self, timeout_s: float) -> Scheduler:
        """Waits until the scheduler is made; raises what `build` raised."""
        return self._built.result(timeout_s)

    def post(self, event: Event) -> None:
        """Tells the scheduler; from any thread."""
        if self._recorder.is_on and not self._inbox:
            self._posted_ns = now_ns()
        self._inbox.append(event)
        self._wake.set()

    def stop(self, timeout_s: float) -> None:
        """Ends the loop after the step in hand."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _main(self) -> None:
        sleep_exactly()
        try:
            scheduler = self._build(self._outbox)
        except BaseException as error:
            self._built.set_exception(error)
            return
        self._built.set_result(scheduler)
        try:
            self._loop(scheduler)
        except BaseException as error:
            logger.exception("the engine thread failed")
            self._on_crash(error)

    def _loop(self, scheduler: Scheduler) -> None:
        recorder = self._recorder
        while not self._stopping:
            recorder.begin_turn()
            if self._inbox:
                self._receive(scheduler)
            worked = scheduler.step()
            self.num_steps += 1
            self.latest_stats = scheduler.stats()
            self._pass_on_changes(scheduler)
            self._outbox.flush()
            recorder.end_turn(self.num_steps, worked=worked)
            if not worked:
                self._wait(scheduler.next_deadline())
                recorder.lap("sleep")

    def _pass_on_changes(self, scheduler: Scheduler) -> None:
        """The first after a while at once, those after it together."""
        now = time.monotonic()
        if now >= self._changes_due and (changes := scheduler.take_cache_changes()) is not None:
            self._changes_due = now + CHANGES_INTERVAL_S
            self._outbox.pass_on_changes(changes)

    def _receive(self, scheduler: Scheduler) -> None:
        if self._recorder.is_on:
            # Who posted while a recording began, or while the inbox was being emptied, may not have noted when.
            self._recorder.add(INBOX, "events wait", max(self._posted_ns, self._emptied_ns))
        num_events = 0
        while self._inbox:
            event = self._inbox.popleft()
            num_events += 1
            if isinstance(event, Inspect):
                event.reply(scheduler.check_integrity(), scheduler.stats())
            elif isinstance(event, StartRecording):
                self._recorder.start()
            elif isinstance(event, StopRecording):
                event.reply(self._recorder.stop())
            else:
                scheduler.receive(event)
        if self._recorder.is_on:
            self._emptied_ns = now_ns()
        self._recorder.lap("receive", num_events=num_events)

    def _wait(self, deadline: float | None) -> None:
        timeout_s = IDLE_TURN_S
        if deadline is not None:
            timeout_s = min(timeout_s, max(0.0, deadline - time.monotonic()))
        if not self._inbox and not self._stopping:
            self._wake.wait(timeout_s)
        self._wake.clear()
