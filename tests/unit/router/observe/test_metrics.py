from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families

from tandem import __version__
from tandem.lifecycle import PHASES, PhaseTiming
from tandem.messages import NO_HITS, ClockReply, TierHits, TokenEvent, Tokens
from tandem.router.errors import RequestError
from tandem.router.observe.metrics import OUTCOMES, RouterMetrics
from tandem.router.requests.clock_offsets import ClockOffsets
from tandem.router.requests.tracker import RequestReport, RequestTracker
from tandem.router.workers.worker_registry import WorkerRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.request_spec import request_spec
from tests.fakes.router_harness import RouterHarness, first_token, run, settle
from tests.fakes.scripted_worker import hello


def samples(metrics: RouterMetrics) -> dict[tuple[str, tuple[str, ...]], float]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {(s.name, tuple(s.labels.values())): s.value for family in families for s in family.samples}


def new_metrics() -> RouterMetrics:
    registry = WorkerRegistry(FakeClock(), 1.0, 1.0)
    for worker_id, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode")):
        registry.register(hello(worker_id, role), lambda _: None, lambda _: None)
    planned = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
    clocks = ClockOffsets(lambda: 3_000_000)
    clocks.receive("p0", ClockReply(1_000_000, 502_000_000, 502_000_000))
    return RouterMetrics(
        *(registry, lambda: 3, lambda: 2, lambda: 1, lambda: "no link"),
        clocks=clocks,
        planned=planned,
        num_restarts=4,
    )


def report(
    outcome: str,
    num_prompt_tokens: int,
    num_output_tokens: int,
    *,
    num_cached_tokens: int = 0,
    loaded: TierHits = NO_HITS,
    timings: Sequence[PhaseTiming] = (),
) -> RequestReport:
    tracker = RequestTracker(
        "r", request_spec((1,) * num_prompt_tokens), prompt_cached_len=num_cached_tokens, prompt_loaded=loaded
    )
    return RequestReport(tracker, outcome, num_output_tokens, num_output_tokens, timings)


def test_ended_requests_are_counted_with_their_tokens_and_phases() -> None:
    metrics = new_metrics()
    for outcome, duration_ms in (("stop", 2.0), ("stop", 0.0), ("abort", 900.0)):
        timings = [PhaseTiming("e2e", 0.0, duration_ms), PhaseTiming("prefill", 0.0, duration_ms)]
        hits = TierHits(host=2, peer=1)
        metrics.request_ended(report(outcome, 10, 5, num_cached_tokens=4, loaded=hits, timings=timings))
    metrics.request_refused("invalid")
    found = samples(metrics)
    assert found["tandem_requests_total", ("stop",)] == 2
    assert found["tandem_requests_total", ("abort",)] == found["tandem_requests_total", ("invalid",)] == 1
    assert found["tandem_prompt_tokens_total", ()] == 30
    assert found["tandem_cached_prompt_tokens_total", ()] == 12
    by_tier = [found["tandem_prompt_hit_tokens_total", (tier,)] for tier in ("pool", "host", "disk", "peer")]
    assert by_tier == [3, 6, 0, 3]
    assert found["tandem_generated_tokens_total", ()] == 15
    assert found["tandem_e2e_seconds_sum", ()] == 0.902
    assert found["tandem_phase_seconds_count", ("prefill",)] == 3


@run
async def test_the_gap_before_each_token_counts_also_where_several_requests_have_theirs_in_one_step() -> None:
    h = RouterHarness()
    one, other = h.request(), h.request()
    await settle()

    def say_step(index: int, *request_ids: str) -> None:
        h.d[0].say(Tokens(tuple(TokenEvent(request_id, 0, index, (7,)) for request_id in request_ids)))

    ids = one.tracker.request_id, other.tracker.request_id
    h.p[0].say(first_token(ids[0], 0, 0, 7))
    h.clock.advance(0.25)
    h.p[0].say(first_token(ids[1], 0, 0, 7))
    h.clock.advance(0.25)
    say_step(1, *ids)
    h.clock.advance(0.125)
    say_step(2, *ids)
    # A repeated token does not count.
    say_step(2, ids[0])
    found = samples(h.router.metrics)
    assert found["tandem_itl_seconds_count", ()] == 4
    assert found["tandem_itl_seconds_sum", ()] == 0.5 + 0.25 + 2 * 0.125
    assert found["tandem_itl_seconds_bucket", ("0.15",)] == 2
    await one.leave()
    await other.leave()


def test_what_is_there_now_is_asked_for_at_each_scrape() -> None:
    found = samples(new_metrics())
    assert (found["tandem_requests_in_hand", ()], found["tandem_requests_queued", ()]) == (3, 2)
    assert found["tandem_requests_waiting", ()] == 1
    assert (found["tandem_workers", ("prefill",)], found["tandem_workers", ("decode",)]) == (2, 1)
    assert found["tandem_ready", ()] == 0


def test_every_value_of_a_label_is_there_from_the_start() -> None:
    found = samples(new_metrics())
    for outcome in ("stop", "length", "abort", *error_outcomes(RequestError)):
        assert found["tandem_requests_total", (outcome,)] == 0
    for kind in ("prefill_failed", "given_back", "lease_lost", "deferred", "worker_lost"):
        assert found["tandem_restarts_total", (kind,)] == 0
    for kind in ("disconnected", "reconnected", "silent", "stalled"):
        assert found["tandem_faults_total", (kind,)] == 0
    for phase in PHASES:
        if phase.name not in ("ttft", "e2e"):
            assert found["tandem_phase_seconds_count", (phase.name,)] == 0


def error_outcomes(cls: type[RequestError]) -> set[str]:
    own = {cls.outcome} if "outcome" in vars(cls) else set()
    return own.union(*map(error_outcomes, cls.__subclasses__()))


def test_the_outcomes_are_those_of_errors_and_of_models() -> None:
    assert set(OUTCOMES) == {"stop", "length", "embedded", "abort"} | error_outcomes(RequestError)


def test_a_worker_of_the_plan_that_is_not_there_shows() -> None:
    found = samples(new_metrics())
    connected = {labels: value for (name, labels), value in found.items() if name == "tandem_worker_connected"}
    assert connected == {("prefill", "p0"): 1, ("prefill", "p1"): 1, ("decode", "d0"): 1, ("decode", "d1"): 0}
    # No link is up yet.
    assert found["tandem_worker_pairs", ()] == 0
    assert found["tandem_wanted_worker_pairs", ()] == 2


def test_a_worker_s_clock_shows_once_it_is_known() -> None:
    found = samples(new_metrics())
    assert found["tandem_clock_offset_seconds", ("prefill", "p0")] == 0.5
    assert found["tandem_clock_uncertainty_seconds", ("prefill", "p0")] == 0.0010002
    assert ("tandem_clock_offset_seconds", ("prefill", "p1")) not in found


def test_the_lengths_of_requests_are_counted_by_size() -> None:
    metrics = new_metrics()
    for num_prompt_tokens, num_output_tokens in ((3, 1), (5, 2), (600, 0)):
        metrics.request_ended(report("stop", num_prompt_tokens, num_output_tokens))
    found = samples(metrics)
    assert found["tandem_request_prompt_tokens_bucket", ("5.0",)] == 2
    assert found["tandem_request_prompt_tokens_bucket", ("1000.0",)] == 3
    assert found["tandem_request_prompt_tokens_sum", ()] == found["tandem_prompt_tokens_total", ()] == 608
    assert found["tandem_request_generated_tokens_bucket", ("1.0",)] == 2
    assert found["tandem_request_generated_tokens_sum", ()] == found["tandem_generated_tokens_total", ()] == 3


def test_the_process_tells_of_itself() -> None:
    found = samples(new_metrics())
    assert found["tandem_build_info", (__version__,)] == 1
    assert found["tandem_process_restarts_total", ()] == 4
    assert found["process_cpu_seconds_total", ()] > 0
    assert found["process_resident_memory_bytes", ()] > 2**20
