"""When the process at the other end of a link counts as gone."""

import subprocess
import sys
import time

import pytest

from kvtransfer import exit_watch
from kvtransfer.exit_watch import ExitWatch


@pytest.fixture
def child() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_a_process_is_gone_a_while_after_its_end(child: "subprocess.Popen[bytes]") -> None:
    watch = ExitWatch(child.pid)
    assert not watch.is_gone()
    child.kill()
    # Not waited for: it stays a zombie, of which nothing runs any more.
    deadline = time.monotonic() + 10.0
    seen_at = time.monotonic()
    while not watch.is_gone():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert time.monotonic() - seen_at >= exit_watch.SETTLE_S
    assert watch.is_gone()
    child.wait()


def test_who_was_never_seen_alive_is_never_seen_to_end(child: "subprocess.Popen[bytes]") -> None:
    """Another host's process, perhaps, or one that this process cannot see."""
    child.kill()
    child.wait()
    watch = ExitWatch(child.pid)
    assert not watch.is_gone()
    time.sleep(exit_watch.SETTLE_S + 0.05)
    assert not watch.is_gone()


def test_a_zombie_was_not_seen_alive(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    time.sleep(0.2)
    assert not ExitWatch(child.pid).is_gone()
    child.wait()
