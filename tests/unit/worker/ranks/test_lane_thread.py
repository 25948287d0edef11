"""The thread of a follower's lanes, over a real channel."""

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tandem.worker.base import LaneDriver
from tandem.worker.ranks import lane_thread
from tandem.worker.ranks.channel import MessageChannel
from tandem.worker.ranks.lane_thread import IDLE_WAIT_S, LaneThread

TIMEOUT_S = 10.0


class Driver:
    """Answers each message. Attributes: may_obey: cleared while the driver hangs."""

    is_busy = False

    def __init__(self) -> None:
        self.may_obey = threading.Event()
        self.may_obey.set()
        self._answers: list[bytes] = []

    def obey(self, message: bytes) -> None:
        assert self.may_obey.wait(TIMEOUT_S)
        self._answers.append(b"done: " + message)

    def poll(self) -> list[bytes]:
        answers, self._answers = self._answers, []
        return answers


class Running:
    """A thread's other end. Attributes: num_beats: of the thread."""

    def __init__(self, build: Callable[[], LaneDriver | None]) -> None:
        here, there = MessageChannel.pair()
        self.leader = MessageChannel(here)
        self.num_beats = 0
        self.thread = LaneThread(build, MessageChannel(there), self._beat)

    def _beat(self) -> None:
        self.num_beats += 1

    def is_moving(self) -> bool:
        before = self.num_beats
        time.sleep(3 * IDLE_WAIT_S)
        return self.num_beats > before


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.may_obey.set()


def test_messages_are_obeyed_and_answered(driver: Driver) -> None:
    running = Running(lambda: driver)
    running.leader.send(b"copy")
    assert running.leader.wait(TIMEOUT_S) and running.leader.receive() == [b"done: copy"]


@pytest.mark.parametrize("has_links", [True, False])
def test_an_idle_thread_beats(driver: Driver, has_links: bool) -> None:
    running = Running(lambda: driver if has_links else None)
    running.thread.wait_built()
    assert running.num_beats and running.is_moving()


def test_a_thread_that_hangs_does_not_beat(driver: Driver) -> None:
    """Its copies would never end, and the lease's pages stay locked at both workers."""
    running = Running(lambda: driver)
    driver.may_obey.clear()
    running.leader.send(b"copy")
    time.sleep(IDLE_WAIT_S)
    assert not running.is_moving()
    driver.may_obey.set()
    assert running.is_moving()


def test_the_process_ends_with_a_failed_driver(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    exited = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda _: exited.set())
    monkeypatch.setattr(lane_thread.logging, "shutdown", lambda: None)

    def fail() -> LaneDriver | None:
        raise RuntimeError("no such transport")

    Running(fail)
    assert exited.wait(TIMEOUT_S)
