"""The engine thread: the only one that touches pages, caches and tensors."""

import collections
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from tandem.lifecycle import now_ns
from tandem.messages import ReceiverMessage, SenderMessage, WorkerMessage, WorkerStats
from tandem.page_changes import PageChanges
from tandem.pagestore.messages import StoreClientMessage
from tandem.recording import INBOX, Recorder
from tandem.timer_slack import sleep_exactly
from tandem.worker.base import Outbox, Scheduler
from tandem.worker.events import Event, Inspect, StartRecording, StopRecording

logger = logging.getLogger(__name__)

# Turn interval of an idle loop, in seconds: the step counter proves that it lives.
IDLE_TURN_S = 0.1
# The interpreter's thread switch interval, in seconds. The default of 5 ms is too long: decode steps are composed 0.3
# ms ahead.
SWITCH_INTERVAL_S = 0.0002
# Minimum interval between reports of cache changes, in seconds.
CHANGES_INTERVAL_S = 0.1


@dataclass(slots=True)
class Outgoing:
    """Outgoing messages of a scheduler.

    Attributes:
        to_links: messages by epoch.
        closed_links: reason by epoch.
        to_store: messages by epoch of the page store's session.
        cache_changes: pages that entered or left the cache, if due.
    """

    to_router: list[WorkerMessage]
    to_links: dict[str, list[SenderMessage | ReceiverMessage]]
    closed_links: dict[str, str]
    to_store: dict[str, list[StoreClientMessage]]
    cache_changes: PageChanges | None = None


class StepOutbox(Outbox):
    def __init__(self, deliver: Callable[[Outgoing], None]) -> None:
        self._deliver = deliver
        self._outgoing = Outgoing([], {}, {}, {})

    def to_router(self, message: WorkerMessage) -> None:
        self._outgoing.to_router.append(message)

    def to_link(self, epoch: str, message: SenderMessage | ReceiverMessage) -> None:
        self._outgoing.to_links.setdefault(epoch, []).append(message)

    def close_link(self, epoch: str, reason: str) -> None:
        self._outgoing.closed_links[epoch] = reason

    def to_store(self, epoch: str, message: StoreClientMessage) -> None:
        self._outgoing.to_store.setdefault(epoch, []).append(message)

    def pass_on_changes(self, changes: PageChanges) -> None:
        self._outgoing.cache_changes = changes

    def flush(self) -> bool:
        outgoing = self._outgoing
        told = outgoing.to_router or outgoing.to_links or outgoing.closed_links or outgoing.to_store
        if told or outgoing.cache_changes is not None:
            self._outgoing = Outgoing([], {}, {}, {})
            self._deliver(outgoing)
            return True
        return False


class EngineThread:
    """Runs a scheduler's loop: take events, step, deliver messages."""

    def __init__(
        self,
        build: Callable[[Outbox], Scheduler],
        deliver: Callable[[Outgoing], None],
        on_crash: Callable[[BaseException], None],
        recorder: Recorder | None = None,
        after_turn: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            build: builds the scheduler, on the thread.
            deliver: delivers messages, on the thread; must not block.
            on_crash: called on the thread when an exception ends the loop.
            after_turn: called on the thread after each turn of the loop; must not block.
        """
        self._build = build
        self._on_crash = on_crash
        self._recorder = recorder or Recorder()
        self._after_turn = after_turn
        self._outbox = StepOutbox(deliver)
        # Its appends and pops are atomic: no lock needed.
        self._inbox: collections.deque[Event] = collections.deque()
        self._wake = threading.Event()
        # Post time of the oldest event and time of the last empty inbox, in nanoseconds since the epoch, while
        # recording.
        self._posted_ns = self._emptied_ns = 0
        self._changes_due = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._built: Future[Scheduler] = Future()
        # Read by other threads; replaced as a whole.
        self.num_steps = 0
        self.latest_stats = WorkerStats()

    def start(self) -> None:
        self._thread.start()

    def wait_built(self, timeout_s: float) -> Scheduler:
        """Waits until the scheduler is built. Raises the error of `build`."""
        return self._built.result(timeout_s)

    def post(self, event: Event) -> None:
        """Passes an event to the scheduler. Callable from any thread."""
        if self._recorder.is_on and not self._inbox:
            self._posted_ns = now_ns()
        self._inbox.append(event)
        self._wake.set()

    def stop(self, timeout_s: float) -> None:
        """Ends the loop after the current step."""
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
            if self._after_turn is not None:
                self._after_turn()
            recorder.end_turn(self.num_steps, worked=worked)
            if not worked:
                self._wait(scheduler.next_deadline())
                recorder.lap("sleep")

    def _pass_on_changes(self, scheduler: Scheduler) -> None:
        now = time.monotonic()
        if now >= self._changes_due and any(changes := scheduler.take_cache_changes()):
            self._changes_due = now + CHANGES_INTERVAL_S
            self._outbox.pass_on_changes(changes)

    def _receive(self, scheduler: Scheduler) -> None:
        if self._recorder.is_on:
            # An event posted at the start of a recording, or while the inbox is emptied, sets no _posted_ns.
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
