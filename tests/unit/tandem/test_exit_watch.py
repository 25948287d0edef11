import subprocess
import sys
import time

import pytest

from tandem import exit_watch
from tandem.exit_watch import ExitWatch, ExitWatches
from tandem.processes import ProcessId


@pytest.fixture
def child() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_process_is_gone_some_time_after_its_end(child: "subprocess.Popen[bytes]") -> None:
    watch = ExitWatch.of(child.pid)
    assert not watch.is_gone()
    child.kill()
    # Unreaped it stays a zombie, which runs nothing.
    deadline = time.monotonic() + 10.0
    seen_at = time.monotonic()
    while not watch.is_gone():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert time.monotonic() - seen_at >= exit_watch.SETTLE_S
    assert watch.is_gone()
    child.wait()


def test_process_never_seen_alive_is_never_gone(child: "subprocess.Popen[bytes]") -> None:
    """It may be another host's process or invisible here."""
    child.kill()
    child.wait()
    watch = ExitWatch.of(child.pid)
    assert not watch.is_gone()
    time.sleep(exit_watch.SETTLE_S + 0.05)
    assert not watch.is_gone()


def test_zombie_is_not_seen_alive(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    time.sleep(0.2)
    assert not ExitWatch.of(child.pid).is_gone()
    child.wait()


def test_many_leases_in_one_step_check_once(child: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch) -> None:
    watch = ExitWatch.of(child.pid)
    num_looks = 0
    original = ProcessId.is_alive

    def is_alive(self: ProcessId) -> bool:
        nonlocal num_looks
        num_looks += 1
        return original(self)

    monkeypatch.setattr(ProcessId, "is_alive", is_alive)
    monkeypatch.setattr(exit_watch, "LOOK_INTERVAL_S", 60.0)
    assert not any(watch.is_gone() for _ in range(1000))
    assert num_looks == 1
    child.kill()
    child.wait()


def test_process_that_was_seen_alive_elsewhere_may_be_gone_already(child: "subprocess.Popen[bytes]") -> None:
    process = ProcessId.of(child.pid)
    child.kill()
    child.wait()
    watch = ExitWatch(process)
    assert not watch.is_gone()
    time.sleep(exit_watch.SETTLE_S + 0.05)
    assert watch.is_gone()


def test_a_worker_of_several_processes_is_gone_when_its_last_one_is(child: "subprocess.Popen[bytes]") -> None:
    """Every rank of a sender writes into the receiver's pages."""
    last = subprocess.Popen(child.args)
    watches = ExitWatches.of([child.pid, last.pid])
    child.kill()
    child.wait()
    deadline = time.monotonic() + exit_watch.SETTLE_S + 0.1
    while time.monotonic() < deadline:
        assert not watches.are_gone()
        time.sleep(0.01)
    last.kill()
    last.wait()
    ended_at = time.monotonic()
    while not watches.are_gone():
        assert time.monotonic() < ended_at + 10.0
        time.sleep(0.01)
    assert time.monotonic() - ended_at >= exit_watch.SETTLE_S
