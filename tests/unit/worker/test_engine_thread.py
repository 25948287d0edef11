"""The engine thread's loop, with a counting scheduler."""

import threading
import time
from concurrent.futures import Future

from tandem.lifecycle import now_ns
from tandem.messages import WorkerStats
from tandem.page_changes import PageChanges
from tandem.pagestore.messages import EndFind
from tandem.recording import INBOX, Recorder, Recording
from tandem.worker.base import Outbox, Scheduler
from tandem.worker.engine_thread import CHANGES_INTERVAL_S, EngineThread, Outgoing
from tandem.worker.events import Event, StartRecording, StopRecording

TIMEOUT_S = 10.0


class Counting(Scheduler):
    def __init__(self) -> None:
        self.received: list[Event] = []

    def receive(self, event: Event) -> None:
        self.received.append(event)

    def step(self) -> bool:
        return False

    def next_deadline(self) -> float | None:
        return None

    def stats(self) -> WorkerStats:
        return WorkerStats()

    def take_cache_changes(self) -> PageChanges | None:
        return None

    def check_integrity(self) -> str:
        return ""


class LateRecorder(Recorder):
    """Reports itself off to other threads, as just before its start."""

    @property
    def is_on(self) -> bool:
        return self._is_on and threading.current_thread().name == "engine"

    @is_on.setter
    def is_on(self, value: bool) -> None:
        self._is_on = value


class Caching(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.num_steps = self._num_told = 0

    def step(self) -> bool:
        self.num_steps += 1
        time.sleep(0.001)
        return True

    def take_cache_changes(self) -> PageChanges | None:
        begin, self._num_told = self._num_told, self.num_steps
        return PageChanges(tuple(bytes([number % 256]) for number in range(begin, self.num_steps)), ())


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_event_posted_at_recording_start_has_a_valid_wait_time() -> None:
    scheduler = Counting()

    def build(outbox: Outbox) -> Scheduler:
        return scheduler

    crashes: list[BaseException] = []
    thread = EngineThread(build, lambda outgoing: None, crashes.append, recorder := LateRecorder())
    thread.start()
    began_ns = now_ns()
    try:
        thread.post(StartRecording())
        wait_until(lambda: recorder._is_on)
        num_steps = thread.num_steps
        wait_until(lambda: thread.num_steps > num_steps)
        thread.post(Event())
        wait_until(lambda: scheduler.received)
        reply: Future[Recording] = Future()
        thread.post(StopRecording(reply.set_result))
        waits = [kept for kept in reply.result(TIMEOUT_S).take(1000) if kept.track == INBOX]
    finally:
        thread.stop(TIMEOUT_S)
    assert waits and crashes == []
    assert all(began_ns <= kept.start_ns <= kept.end_ns for kept in waits)


def test_cache_changes_are_passed_on_at_once_then_batched() -> None:
    told: list[PageChanges] = []

    def deliver(outgoing: Outgoing) -> None:
        assert outgoing.cache_changes is not None
        told.append(outgoing.cache_changes)

    thread = EngineThread(lambda outbox: Caching(), deliver, lambda error: None)
    begun = time.monotonic()
    thread.start()
    wait_until(lambda: len(told) >= 3)
    took_s = time.monotonic() - begun
    thread.stop(TIMEOUT_S)
    first, second, third, *_ = [len(changes.stored) for changes in told]
    assert first == 1
    assert min(second, third) > 1
    assert took_s >= 2 * CHANGES_INTERVAL_S
    numbers = b"".join(page for changes in told for page in changes.stored)
    assert numbers == bytes(number % 256 for number in range(len(numbers)))


class Telling(Counting):
    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        outbox.to_store("e1", EndFind(1))
        outbox.to_store("e2", EndFind(2))
        outbox.to_store("e1", EndFind(3))


def test_messages_to_the_store_keep_their_epochs() -> None:
    told: list[Outgoing] = []
    thread = EngineThread(Telling, told.append, lambda error: None)
    thread.start()
    wait_until(lambda: told != [])
    thread.stop(TIMEOUT_S)
    assert [outgoing.to_store for outgoing in told] == [{"e1": [EndFind(1), EndFind(3)], "e2": [EndFind(2)]}]


def test_after_turn_runs_on_the_thread_after_each_step() -> None:
    seen: list[tuple[str, int]] = []
    scheduler = Caching()
    thread = EngineThread(
        lambda outbox: scheduler,
        lambda outgoing: None,
        lambda error: None,
        after_turn=lambda: seen.append((threading.current_thread().name, scheduler.num_steps)),
    )
    thread.start()
    wait_until(lambda: len(seen) >= 5)
    thread.stop(TIMEOUT_S)
    assert seen == [("engine", number) for number in range(1, len(seen) + 1)]
