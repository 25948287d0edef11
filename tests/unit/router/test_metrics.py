"""What the router counts, in Prometheus' format."""

from prometheus_client.parser import text_string_to_metric_families

from router.metrics import SECONDS_BUCKETS, RouterMetrics, SecondsHistogram
from router.worker_registry import WorkerRegistry
from tandem.lifecycle import PhaseTiming
from tests.fakes.clock import FakeClock
from tests.fakes.scripted_worker import hello


def samples(metrics: RouterMetrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """By name and values of labels."""
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {(s.name, tuple(s.labels.values())): s.value for family in families for s in family.samples}


def new_metrics() -> RouterMetrics:
    registry = WorkerRegistry(FakeClock(), 1.0, 1.0)
    for worker_id, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode")):
        registry.register(hello(worker_id, role), lambda _: None, lambda _: None)
    return RouterMetrics(registry, lambda: 3, lambda: 2, lambda: 1, lambda: "no link")


def test_ended_requests_are_counted_with_their_tokens_and_phases() -> None:
    metrics = new_metrics()
    for outcome, duration_ms in (("stop", 2.0), ("stop", -1.0), ("abort", 900.0)):
        metrics.request_ended(
            outcome,
            num_prompt_tokens=10,
            num_cached_tokens=4,
            num_output_tokens=5,
            timings=[PhaseTiming("e2e", 0.0, duration_ms), PhaseTiming("prefill", 0.0, duration_ms)],
        )
    metrics.request_refused("invalid")
    found = samples(metrics)
    assert found["tandem_requests_total", ("stop",)] == 2
    assert found["tandem_requests_total", ("abort",)] == found["tandem_requests_total", ("invalid",)] == 1
    assert found["tandem_prompt_tokens_total", ()] == 30
    assert found["tandem_cached_prompt_tokens_total", ()] == 12
    assert found["tandem_generated_tokens_total", ()] == 15
    # What seems to have ended before it began took no time.
    assert found["tandem_e2e_seconds_sum", ()] == 0.902
    assert found["tandem_phase_seconds_count", ("prefill",)] == 3


def test_what_is_there_now_is_asked_for_at_each_scrape() -> None:
    found = samples(new_metrics())
    assert (found["tandem_requests_in_hand", ()], found["tandem_requests_queued", ()]) == (3, 2)
    assert found["tandem_requests_waiting", ()] == 1
    assert (found["tandem_workers", ("prefill",)], found["tandem_workers", ("decode",)]) == (2, 1)
    assert found["tandem_ready", ()] == 0


def test_a_duration_is_in_the_first_bucket_that_holds_it() -> None:
    metrics = new_metrics()
    for seconds in (0.0, SECONDS_BUCKETS[0], SECONDS_BUCKETS[1], 1e6):
        metrics.itl.observe(seconds)
    found = samples(metrics)
    assert found["tandem_itl_seconds_bucket", (str(SECONDS_BUCKETS[0]),)] == 2
    assert found["tandem_itl_seconds_bucket", (str(SECONDS_BUCKETS[1]),)] == 3
    assert found["tandem_itl_seconds_bucket", (str(SECONDS_BUCKETS[-1]),)] == 3
    assert found["tandem_itl_seconds_bucket", ("+Inf",)] == found["tandem_itl_seconds_count", ()] == 4


def test_buckets_rise() -> None:
    assert list(SECONDS_BUCKETS) == sorted(set(SECONDS_BUCKETS))
    assert isinstance(new_metrics().itl, SecondsHistogram)
