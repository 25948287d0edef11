"""Good requests, against counts by hand and by brute force."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.bench.goodput import Slo, goodput, parse_duration
from tests.unit.tandem.bench.records import record


def test_durations_and_limits_are_read_with_their_units() -> None:
    assert [parse_duration(text) for text in ("500ms", "2s", "1.5m", "100us")] == pytest.approx([0.5, 2, 90, 1e-4])
    assert Slo.parse("ttft=500ms, itl_p95=25ms").limits == (("ttft", 0.5), ("itl_p95", 0.025))


@pytest.mark.parametrize("text", ["ttft", "ttft=5", "ttft=-1s", "speed=1s", "ttft=1s,ttft=2s", "", "itl_p101=1s"])
def test_malformed_slo_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Slo.parse(text)


def test_a_count_by_hand() -> None:
    slo = Slo.parse("ttft=1s,itl_max=500ms")
    records = [
        record([1.0, 1.5]),  # meets both limits exactly
        record([1.1, 1.2]),  # late
        record([0.5, 1.2]),  # stalls
        record([1.2, 2.0]),  # both
        record([0.1]),
        record([0.1, 0.2], error="too_short"),
        record([], error="refused"),
        record([9.0], is_warmup=True),
        record([9.0], error="cut"),
    ]
    found = goodput(records, slo, 4.0)
    assert (found["num_counted"], found["num_good"]) == (7, 2)
    assert found["good_share"] == pytest.approx(2 / 7) and found["good_requests_per_s"] == 0.5
    assert found["missed"] == {"ttft": 2, "itl_max": 2}


def test_an_answer_without_tokens_is_not_good() -> None:
    assert not Slo.parse("ttft=10s").is_good(record([]))
    assert Slo.parse("itl_p95=1ms,itl_mean=1ms,tpot=1ms").is_good(record([5.0]))


times = st.lists(st.integers(1, 400).map(lambda n: n / 100), min_size=1, max_size=8).map(sorted)


@settings(max_examples=50)
@given(st.lists(times, min_size=1, max_size=12), st.integers(1, 300), st.integers(1, 100), st.integers(1, 400))
def test_by_brute_force(all_times: list[list[float]], ttft: int, itl: int, e2e: int) -> None:
    # Offset by half a step, so that rounding never decides.
    limits = [limit / 100 + 0.005 for limit in (ttft, itl, itl, e2e)]
    slo = Slo(tuple(zip(("ttft", "itl_p95", "tpot", "e2e"), limits, strict=True)))
    num_good = 0
    for one in all_times:
        gaps = [b - a for a, b in pairwise(one)]
        is_good = one[0] <= limits[0] and one[-1] <= limits[3]
        if gaps:
            is_good &= bool(np.percentile(gaps, 95) <= limits[1] + 1e-9) and sum(gaps) / len(gaps) <= limits[2] + 1e-9
        num_good += is_good
    assert goodput([record(one) for one in all_times], slo, 1.0)["num_good"] == num_good
