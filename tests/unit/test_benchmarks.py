"""The benchmarks run; what they measure is not judged here."""

import json
from dataclasses import asdict

import pytest

from benchmarks import cpu, host_side

TINY = host_side.Sizes(batches=(1, 2, 4), context=20, prompts=(64, 128), repeats=1)


def test_host_side_measures_every_size() -> None:
    rows = {row.name: row for row in host_side.measure(TINY)}
    assert {f"decode step, batch {n}" for n in TINY.batches} <= rows.keys()
    assert {"match and insert, 128 tokens, new", "match and insert, 128 tokens, cached"} <= rows.keys()
    assert "growth of decode step, batch 2 to 4" in rows
    assert all(row.value > 0 for row in rows.values())
    json.dumps([asdict(row) for row in rows.values()])


def test_a_ratio_is_taken_within_each_round() -> None:
    rounds = [cpu.Round(1.0, 2.0, 1, [3.0]), cpu.Round(2.0, 2.2, 1, [5.0]), cpu.Round(1.0, 1.5, 1, [4.0])]
    result = cpu.summarize(1, 10, rounds)
    assert (result["ratio_min"], result["ratio"], result["ratio_max"]) == pytest.approx((1.1, 1.5, 2.0))
    assert result["tandem_tokens_per_s"] == 10.0
    assert result["transfer_ms"] == 4.0
    assert result["ok"]


def test_other_tokens_are_not_ok() -> None:
    result = cpu.summarize(8, 10, [cpu.Round(1.0, 2.0, 7, [3.0] * 8)])
    assert (result["equal"], result["of"], result["ok"]) == (7, 8, False)
