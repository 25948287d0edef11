"""Copies between a pool and a region in host memory."""

import threading
import time

import numpy as np
import pytest

from tandem.engine.kvcache.base import Completion
from tandem.pagestore.client.cpu_copies import CpuRegionCopies

TIMEOUT_S = 20.0


def wait(completion: Completion) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not completion.done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_pages_go_both_ways() -> None:
    pool = np.arange(8 * 64, dtype=np.uint8).reshape(8, 64)
    region = np.zeros((16, 64), np.uint8)
    copies = CpuRegionCopies(pool, region)
    before = pool.copy()
    wait(copies.copy_out([1, 5], [9, 3]))
    assert (region[9] == before[1]).all() and (region[3] == before[5]).all()
    wait(copies.copy_in([9, 3], [0, 7]))
    assert (pool[0] == before[1]).all() and (pool[7] == before[5]).all()
    assert (pool[1:7] == before[1:7]).all()
    copies.close()


def test_close_waits_for_all_copies() -> None:
    pool = np.ones((64, 1 << 20), np.uint8)
    region = np.zeros_like(pool)
    copies = CpuRegionCopies(pool, region)
    completions = [copies.copy_out(range(64), range(64)) for _ in range(3)]
    copies.close()
    assert all(completion.done() for completion in completions)
    assert region.all()
    assert not [t for t in threading.enumerate() if t.name.startswith("copy-") and t.is_alive()]


def test_failed_copy_is_reported() -> None:
    copies = CpuRegionCopies(np.zeros((2, 8), np.uint8), np.zeros((2, 8), np.uint8))
    with pytest.raises(RuntimeError, match="a copy between pool and region failed"):
        wait(copies.copy_out([0], [5]))
    wait(copies.copy_out([0], [1]))
    copies.close()


def test_copies_leave_the_interpreter_to_other_threads() -> None:
    pool = np.ones((4, 64 << 20), np.uint8)
    region = np.zeros_like(pool)
    copies = CpuRegionCopies(pool, region)
    num_turns = 0
    completion = copies.copy_out(range(4), range(4))
    while not completion.done():
        num_turns += 1
    copies.close()
    # A copy under the interpreter's lock would leave none.
    assert num_turns > 100
