"""Ratios of forward passes with adapters."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import adapters
from benchmarks.adapters import NUM_ROUNDS, Ratios, load_row
from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.models.build import build_model
from tandem.engine.models.config import ModelConfig
from tests.fakes.engine import FakeEngine
from tests.fakes.model_config import TINY_LLAMA


def test_steps_and_prefills_against_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapted = (FakeEngine(64, adapters.PAGE_SIZE, asynchronous=True) for _ in range(2))
    # Each forward pass of the adapted engine takes twice as long.
    monkeypatch.setattr(adapters.time, "perf_counter", lambda: len(base.batches) + 2 * len(adapted.batches))
    ratios = Ratios(base, adapted, 32)
    rows = [*ratios.decode(3, 40, (1, 2)), *ratios.prefill(2, 30, (1, 8))]
    assert [(row.name, row.value) for row in rows] == [
        ("decode step, batch 3: base", 1000),
        ("decode step, batch 3, slots but no adapter: times base", 2),
        ("decode step, batch 3, 1 adapters: times base", 2),
        ("decode step, batch 3, 2 adapters: times base", 2),
        ("prefill, 2 x 30: base", 1000),
        ("prefill, 2 x 30, slots but no adapter: times base", 2),
        ("prefill, 2 x 30, 1 adapters: times base", 2),
    ]
    assert not rows[2].ok and rows[1].ok
    per_round = adapters.NUM_WARMUPS + adapters.NUM_REPEATS["decode"]
    assert base.batches[: NUM_ROUNDS * per_round] == [("decode", [1, 1, 1])] * (NUM_ROUNDS * per_round)
    assert base.num_launched == adapted.num_launched == 0


def test_every_slot_is_filled(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    model = build_model(ModelConfig.from_dir(tmp_path), torch.float32, torch.device("cpu"))
    slots = AdapterSlots(model, 3, 4, torch.device("cpu"))
    assert load_row(slots, 2).value > 0
    for held in slots.held:
        assert held.linear.adapters is not None and (held.linear.adapters.ranks == 2).all()
