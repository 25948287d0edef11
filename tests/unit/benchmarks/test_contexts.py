"""Timing of decode steps at given contexts and of prefills."""

import pytest

from benchmarks import contexts
from benchmarks.contexts import NUM_STEPS, NUM_WARMUPS, Contexts
from tandem.engine.floors import Limits, decode_floor, prefill_floor
from tests.fakes.engine import FakeEngine
from tests.fakes.model_shapes import DEEPSEEK_V2_LITE

LIMITS = Limits(4e12, 8e14)


def test_steps_and_prefills_against_their_floors(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(64, contexts.PAGE_SIZE, asynchronous=True)
    monkeypatch.setattr(contexts, "CHUNK_SIZE", 64)
    monkeypatch.setattr(contexts.time, "perf_counter", lambda: len(engine.batches))
    measured = Contexts(engine, DEEPSEEK_V2_LITE, LIMITS, "fp8_e4m3")
    step, ratio, launch = measured.decode(3, 40)
    assert (step.name, step.value) == ("decode step, batch 3, contexts of 40", 1000)
    assert ratio.value == 1 / decode_floor(DEEPSEEK_V2_LITE, LIMITS, 3, 40, "fp8_e4m3")
    assert launch.value == 1000
    assert engine.batches == [("decode", [1, 1, 1])] * (NUM_WARMUPS + NUM_STEPS)
    engine.batches.clear()
    rate, ratio = measured.prefill(4, 30)
    # Two prompts a forward pass, and one more forward pass to warm up.
    assert engine.batches == [("prefill", [30, 30])] * 3
    assert (rate.value, rate.unit) == (60, "tok/s")
    assert ratio.value == 2 / prefill_floor(DEEPSEEK_V2_LITE, LIMITS, 4, 30)
    assert engine.num_launched == 0
