"""Measures of known times."""

import statistics
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.measures import RequestMeasures, distribution, percentile, summarize, summarize_within
from tests.unit.tandem.bench.records import record

moments = st.floats(0.001, 100, allow_nan=False)


def test_the_measures_of_one_request() -> None:
    measures = RequestMeasures.of(record([1.5, 1.6, 1.8, 2.5], due_s=1.0, sent_s=1.1, ended_s=2.6))
    assert measures.ttft == pytest.approx(0.5)
    assert measures.ttft_from_sent == pytest.approx(0.4)
    assert measures.gaps == pytest.approx([0.1, 0.2, 0.7])
    assert measures.tpot == pytest.approx(1.0 / 3)
    assert measures.itl_max == pytest.approx(0.7)
    assert measures.itl_p95 == pytest.approx(0.65)
    assert measures.e2e == pytest.approx(1.6)


def test_a_chunk_of_several_tokens_is_one_gap_and_as_many_tokens() -> None:
    measures = RequestMeasures.of(record([1.0, 2.0, 3.0], counts=[1, 4, 4]))
    assert list(measures.gaps) == [1.0, 1.0]
    assert measures.tpot == pytest.approx(2.0 / 8)


def test_one_token_has_neither_gap_nor_tpot() -> None:
    measures = RequestMeasures.of(record([1.0]))
    assert (measures.tpot, measures.itl_p95, measures.itl_max, list(measures.gaps)) == (None, None, None, [])


@given(st.lists(moments, min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9)


@given(st.lists(st.lists(moments, min_size=1, max_size=10).map(sorted), min_size=1, max_size=10))
def test_all_requests_together_by_brute_force(all_times: list[list[float]]) -> None:
    summary: Any = summarize([record(times, index=n) for n, times in enumerate(all_times)])
    gaps = [b - a for times in all_times for a, b in pairwise(times)]
    assert summary["ttft"]["mean"] == pytest.approx(statistics.fmean(times[0] for times in all_times))
    assert summary["num_output_tokens"] == sum(map(len, all_times))
    last = max(times[-1] for times in all_times)
    assert summary["output_tokens_per_s"] == pytest.approx(sum(map(len, all_times)) / last)
    assert summary["longest_gap"] == max(gaps, default=None)
    if gaps:
        assert summary["itl"]["count"] == len(gaps)
        assert summary["itl"]["p99"] == pytest.approx(float(np.percentile(gaps, 99)))


def test_latencies_exclude_warmup_and_failures() -> None:
    records = [
        record([9.0], is_warmup=True),
        record([1.0, 2.0]),
        record([7.0], error="failed", detail="the stream broke"),
        record([8.0], error="cut"),
    ]
    summary: Any = summarize(records)
    assert (summary["num_requests"], summary["num_whole"], summary["num_cut"], summary["num_warmup"]) == (3, 1, 1, 1)
    assert summary["ttft"]["max"] == 1.0 and summary["num_output_tokens"] == 2
    assert summary["errors"] == {"failed": 1}
    assert summary["error_examples"] == {"failed": "the stream broke"}


def test_streams_are_measured_while_the_others_run() -> None:
    """Counts the gap in which the first request arrived, but no earlier gap."""
    stream = record([0.0, 5.0, 6.0, 8.0, 9.0], group="streams", error="cut")
    summary: Any = summarize_within([stream], 5.5, 8.5)
    assert summary["itl"]["max"] == 2.0 and summary["itl"]["count"] == 2
    assert summary["ttft"] is None and summary["e2e"] is None
    assert summary["duration_s"] == 3.0


def test_token_counts_reported_by_the_server_are_used() -> None:
    records = [record([1.0], prompt_tokens=7, cached_tokens=4), record([1.0])]
    summary: Any = summarize(records)
    assert summary["num_input_tokens"] == 7 + 10 and summary["num_cached_tokens"] == 4


def test_nothing_has_no_distribution() -> None:
    assert distribution([]) is None
    summary: Any = summarize([])
    assert summary["ttft"] is None and summary["requests_per_s"] == 0.0


def test_stream_tokens_count_within_the_window() -> None:
    """The chunk before the window starts its first gap but adds no token, like any earlier chunk."""
    before = record([1.0, 2.0, 3.0], group="streams")
    stream = record([0.0, 5.0, 6.0, 8.0, 9.0], group="streams", error="cut")
    summary = summarize_within([before, stream], 5.5, 8.5)
    assert summary["num_output_tokens"] == 2
    assert summary["output_tokens_per_s"] == pytest.approx(2 / 3)


def test_cached_tokens_of_the_page_store_are_summed_by_tier() -> None:
    hits = [{}, {"host_tokens": 4, "disk_tokens": 0}, {"host_tokens": 2, "disk_tokens": 16}]
    summary = summarize([record([1.0], cached_tokens=32, loaded_tokens=one) for one in hits])
    assert summary["num_loaded_tokens"] == {"host_tokens": 6, "disk_tokens": 16}
    assert summarize([record([1.0], cached_tokens=32)])["num_loaded_tokens"] == {}


def test_unreported_cached_tokens_are_unknown() -> None:
    assert summarize([record([1.0])])["num_cached_tokens"] is None
    assert summarize([record([1.0], cached_tokens=0)])["num_cached_tokens"] == 0
