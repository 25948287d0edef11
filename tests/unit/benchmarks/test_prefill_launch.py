"""Timing of a prefill's launch."""

import random

import pytest

from benchmarks import prefill_launch
from benchmarks.prefill_launch import batch_of, time_forwards
from tests.fakes.engine import FakeEngine


def test_each_prompt_has_pages_of_its_own() -> None:
    batch = batch_of(3, 20, 50, random.Random(0))
    assert [list(s.page_ids) for s in batch.sequences] == [[0, 1], [2, 3], [4, 5]]
    assert [s.extend_len for s in batch.sequences] == [20, 20, 20]


def test_forward_is_timed_to_launch_and_to_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    # Times before, after the launch, and at the tokens.
    times = iter([0.0, 9.0, 9.0, 10.0, 10.002, 10.005, 20.0, 20.004, 20.009, 30.0, 30.003, 30.007])
    monkeypatch.setattr(prefill_launch.time, "perf_counter", lambda: next(times))
    engine = FakeEngine(8, 16)
    batches = [batch_of(1, 4, 50, random.Random(n)) for n in range(4)]
    assert time_forwards(engine, batches) == pytest.approx((3.0, 7.0))
