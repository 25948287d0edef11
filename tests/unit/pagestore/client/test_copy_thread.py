"""Copies in a thread."""

import threading
from collections.abc import Sequence

import pytest

from tandem.pagestore.client import copy_thread
from tandem.pagestore.client.copy_thread import CopyThread
from tests.fakes.transport import ManualCompletion
from tests.unit.pagestore.client.test_cpu_copies import wait


class BegunCopy(ManualCompletion):
    seconds = 2.0


def test_copy_has_ended_when_what_it_began_has() -> None:
    began = threading.Event()
    end = BegunCopy()

    def copy(sources: Sequence[int], destinations: Sequence[int]) -> BegunCopy:
        began.set()
        return end

    thread = CopyThread("copy-test", copy)
    completion = thread.start([1], [2])
    assert began.wait(20.0)
    assert not completion.done()
    end.is_done = True
    wait(completion)
    assert completion.seconds == 2.0
    thread.close()


def test_copies_run_in_order() -> None:
    seen: list[tuple[int, ...]] = []
    thread = CopyThread("copy-test", lambda sources, destinations: seen.append((*sources, *destinations)))
    ends = [thread.start([i], [i + 1]) for i in range(20)]
    thread.close()
    assert seen == [(i, i + 1) for i in range(20)] and all(end.done() for end in ends)


def test_close_reports_a_copy_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_thread, "CLOSE_S", 0.05)
    has_begun, may_end = threading.Event(), threading.Event()

    def copy(sources: Sequence[int], destinations: Sequence[int]) -> None:
        has_begun.set()
        may_end.wait(20.0)

    thread = CopyThread("copy-test", copy)
    stuck = thread.start([0], [0])
    assert has_begun.wait(20.0)
    with pytest.raises(RuntimeError, match="do not end within"):
        thread.close()
    may_end.set()
    wait(stuck)
    assert 0.05 <= stuck.seconds < 20.0
