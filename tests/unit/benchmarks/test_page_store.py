"""The page store's benchmark, as far as it needs no cluster."""

import pytest

from benchmarks.page_store.copies import CpuEnds, measure_copies
from benchmarks.page_store.host import HostSizes, measure
from benchmarks.page_store.streams import compare


def test_copies_are_measured_both_ways_beside_plain_ones() -> None:
    ends = CpuEnds(4096, 64)
    rows = measure_copies(ends)
    ends.close()
    assert [row.name for row in rows] == [
        "pool to store, plain copy",
        "pool to store, scattered pages",
        "store to pool, plain copy",
        "store to pool, scattered pages",
        "both ways at once, each way",
    ]
    assert min(row.value for row in rows) > 0
    assert [row.low is not None for row in rows] == [False, True, False, True, False]


def test_streams_beside_loads_are_held_to_those_beside_hits() -> None:
    idle = {"p50": 10.0, "p99": 20.0, "pool": 100.0, "loaded": 0.0}
    busy = {"p50": 10.0, "p99": 23.0, "pool": 1.0, "loaded": 99.0}
    rows = {row.name.strip(): row for row in compare(idle, busy)}
    assert not rows["ratio of p99"].ok
    assert rows["loaded from the store"].value == 99.0


def test_turns_are_measured_while_prompts_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.page_store.host.freeze_objects", lambda: None)
    monkeypatch.setattr("benchmarks.page_store.host.collect_seldom", lambda: None)
    sizes = HostSizes(
        num_streams=2,
        stream_tokens=400,
        num_documents=4,
        prefix_tokens=320,
        question_tokens=16,
        seconds=1.0,
        small_pool_pages=2 * 40 + 44,
    )
    measured = measure(sizes, sizes.small_pool_pages, 200)
    assert measured.num_loaded > 0 and len(measured.gaps_s) > 50
    assert 0.0 <= max(measured.idle_s) < 1.0
