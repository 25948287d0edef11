import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.router.observe.histograms import (
    E2E_SECONDS,
    ITL_SECONDS,
    PHASE_SECONDS,
    TOKENS,
    TTFT_SECONDS,
    HistogramFamily,
)


def test_value_is_in_first_fitting_bucket() -> None:
    family = HistogramFamily("gaps_seconds", "Gaps.", (0.5, 1.0))
    for value in (0.0, 0.5, 0.75, 1e6):
        family.only.observe(value)
    assert family.exposition() == (
        "# HELP gaps_seconds Gaps.\n"
        "# TYPE gaps_seconds histogram\n"
        'gaps_seconds_bucket{le="0.5"} 2\n'
        'gaps_seconds_bucket{le="1.0"} 3\n'
        'gaps_seconds_bucket{le="+Inf"} 4\n'
        "gaps_seconds_count 4\n"
        "gaps_seconds_sum 1000001.25\n"
    )


def test_label_values_count_separately() -> None:
    family = HistogramFamily("phase_seconds", "Phases.", (1.0,), "phase", ("prefill", "decode"))
    family.by_value["decode"].observe(2.0)
    (parsed,) = text_string_to_metric_families(family.exposition())
    counts = {(s.name, s.labels["phase"], s.labels.get("le", "")): s.value for s in parsed.samples}
    assert parsed.type == "histogram"
    assert counts["phase_seconds_count", "prefill", ""] == counts["phase_seconds_bucket", "decode", "1.0"] == 0
    assert counts["phase_seconds_bucket", "decode", "+Inf"] == 1
    assert counts["phase_seconds_sum", "decode", ""] == 2.0


@pytest.mark.parametrize("buckets", [ITL_SECONDS, TTFT_SECONDS, E2E_SECONDS, PHASE_SECONDS, TOKENS])
def test_buckets_rise(buckets: tuple[float, ...]) -> None:
    assert list(buckets) == sorted(set(buckets))


@pytest.mark.parametrize("objective_ms", [2, 5, 10, 12, 15, 20, 25, 30, 40, 50])
def test_itl_objectives_are_bounds(objective_ms: int) -> None:
    assert objective_ms / 1e3 in ITL_SECONDS
