"""Timing of a step with a piece of a prompt."""

from collections import Counter

import pytest

from benchmarks import mixed_forward
from benchmarks.mixed_forward import NUM_REPEATS, NUM_WARMUPS, PAGE_SIZE, measure
from tests.fakes.engine import FakeEngine

NUM_STEPS = NUM_WARMUPS + NUM_REPEATS


def test_same_work_repeats_in_one_forward_and_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_forward, "STEPS", ((2, 32),))
    monkeypatch.setattr(mixed_forward, "PIECES", ((8, 16), (5, 0)))
    # Two forwards take twice as long as one.
    engine = FakeEngine(8, PAGE_SIZE, asynchronous=True)
    monkeypatch.setattr(mixed_forward.time, "perf_counter", lambda: len(engine.batches))
    rows = list(measure(engine, 50, lambda *of: 0.5))
    assert [row.name for row in rows] == [
        "2 x 32, piece of 8 behind 16: apart",
        "2 x 32, piece of 8 behind 16: mixed",
        "2 x 32, piece of 8 behind 16: mixed",
        "2 x 32, piece of 5 behind 0: apart",
        "2 x 32, piece of 5 behind 0: mixed",
        "2 x 32, piece of 5 behind 0: mixed",
    ]
    assert [row.value for row in rows] == [2000.0, 1000.0, 2.0] * 2
    assert Counter((mode, tuple(tokens)) for mode, tokens in engine.batches) == {
        ("prefill", (8,)): NUM_STEPS,
        ("prefill", (5,)): NUM_STEPS,
        ("decode", (1, 1)): 2 * NUM_STEPS,
        ("mixed", (1, 1, 8)): NUM_STEPS,
        ("mixed", (1, 1, 5)): NUM_STEPS,
    }
    # All forwards have run in the end.
    assert engine.num_launched == 0


def test_pool_fits_the_measurement() -> None:
    for num_rows, num_context in mixed_forward.STEPS:
        for num_tokens, num_cached in mixed_forward.PIECES:
            assert num_rows * num_context + num_tokens + num_cached <= mixed_forward.NUM_PAGES * PAGE_SIZE
