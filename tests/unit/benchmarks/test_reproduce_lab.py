"""The lab's figures come from the records, and its report has them."""

from typing import Any

import pytest

from benchmarks import reproduce_lab
from benchmarks.reproduce_lab import DEFAULTS, FILL, PAGE_SIZE, cached_share, figures, gaps_before, phase_means, slim
from tandem.bench.results import make_result
from tests.unit.tandem.bench.records import record
from tests.unit.tandem.bench.test_results import a_run


def test_figures_of_records() -> None:
    one = record([1.5], index=1, due_s=1.0, phases_ms={"prefill": 10.0}, output_digest="b", cached_tokens=5)
    other = record([1.2], index=0, due_s=1.0, phases_ms={"prefill": 20.0, "decode": 4.0}, output_digest="a")
    lost = record([], index=2, error="failed", phases_ms={"prefill": 500.0})
    assert phase_means([one, other, lost]) == {"prefill": 15.0, "decode": 2.0}
    assert cached_share([one, other]) == 0.25
    stream = record([0.1, 0.2, 0.4, 1.9], group="streams")
    quiet = gaps_before([one, stream], 1.0)
    assert quiet is not None and quiet["count"] == 2 and quiet["max"] == pytest.approx(0.2)


def test_sizes_fill_the_pools_and_chunk_the_burst() -> None:
    for sizes in DEFAULTS.values():
        assert FILL > 1 and sizes.max_model_len <= sizes.cache_pages * PAGE_SIZE
        assert sizes.chunk < sizes.burst_input <= sizes.whole


def test_the_report_has_the_figures_and_the_failures() -> None:
    records = [record([1.4, 1.42], due_s=1.0, phases_ms={"decode": 20.0})]
    stream = record([1.1, 1.12, 1.14], group="streams", error="cut")
    result = make_result(*a_run(records=[*records, stream]))
    run: dict[str, Any] = figures(result, records)
    burst = {**run, "streams_itl": slim(result["streams"]["itl"]), "quiet_itl": None}
    step = {**run, "cached_share": 0.5, "answers": ["a"]}
    text = reproduce_lab.report(
        {
            "model": "tiny",
            "device": "cpu",
            "command": "lab",
            "began": "now",
            "burst": {"both/whole": burst},
            "concurrency": {"both, 1 at a time": run},
            "cache": {"cold": step, "warm": step | {"answers": ["b"]}},
            "starts": {"both/whole": {"ready_s": 3.0, "gpu_memory": {}}},
            "failures": {"1p1d/cache": "no time"},
        }
    )
    assert "| both/whole | 400.0 | 400.0 |  | 20.0 | 20.0 | 20.0 |" in text
    assert "| warm | 1 | 400.0 | 400.0 | 50% | no |" in text
    assert "- 1p1d/cache: no time" in text
