"""The benchmarks run to their end."""

import json

import pytest

from benchmarks import cpu, host_side, router, routing
from tandem.router.policies.table import ROUTING_POLICIES


def test_host_side_benchmark_measures_every_name() -> None:
    rows = host_side.measure(host_side.Sizes(batches=(2, 4), context=40, prompts=(64, 128), repeats=2))
    assert [row for row in rows if row.value <= 0] == []
    assert sum("growth" in row.name for row in rows) == 4


@pytest.mark.slow
def test_router_benchmark_measures_every_name() -> None:
    sizes = router.Sizes(
        streams=(2,), seconds=0.5, rounds=1, long_requests=2, first_tokens=4, requests=40, sample_every=40
    )
    rows = router.measure(sizes)
    counted = [row for row in rows if row.unit in ("tokens/CPU s", "tokens/message", "CPU us")]
    assert counted
    assert [row for row in counted if row.value <= 0] == []
    assert {row.name for row in rows if row.aim} == {
        "2 streams, full: ratio",
        "2 streams, paced: ratio",
        "256-token requests: ratio",
        "first token, p50: added",
        "growth over 40 of them",
    }


@pytest.mark.slow
def test_routing_is_fast_with_many_workers_and_requests() -> None:
    rows = {row.name: row.value for row in routing.measure(num_workers=240, num_requests=25, num_in_hand=3000)}
    for routing_policy in ROUTING_POLICIES.names:
        # Going through all pairs takes over 60 ms.
        assert rows[f"240x240 workers, {routing_policy}"] < 5.0
    assert rows["3,000 in hand: a check of deadlines"] < 1.0
    assert rows["  submitting one more"] < 1.0


def test_missed_ratio_or_other_tokens_is_not_ok() -> None:
    good = cpu.Round(tandem_s=1.0, generate_s=1.2, num_equal=1, transfer_ms=[1.0])
    assert cpu.summarize(1, 10, [good])["ok"]
    assert not cpu.summarize(1, 10, [good._replace(tandem_s=1.19)])["ok"]
    assert not cpu.summarize(1, 10, [good._replace(num_equal=0)])["ok"]
    json.dumps(cpu.summarize(1, 10, [good]))
