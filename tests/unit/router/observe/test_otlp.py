import logging
from collections.abc import Iterator

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tandem.lifecycle import (
    ASSIGNED,
    COMMITTED,
    DECODE_STARTED,
    ENDED,
    FIRST_TOKEN,
    FIRST_TOKEN_SENT,
    LAST_TOKEN,
    LEASE_GRANTED,
    PREFILL_STARTED,
    RECEIVED,
    TOKENIZED,
    phase_timings,
)
from tandem.messages import TierHits
from tandem.router.observe.otlp import OtlpExporter
from tandem.router.observe.request_spans import RequestSpans, TracedRequest
from tandem.router.requests.client_ids import TraceContext
from tandem.router.requests.tracker import RequestReport, RequestState, RequestTracker
from tandem.sampling_params import SamplingParams
from tests.fakes.otlp_collector import OtlpCollector, attributes_of
from tests.fakes.request_spec import request_spec

START_NS = 1_800_000_000 * 10**9
MS = 10**6
MOMENTS_MS = {
    RECEIVED: 0,
    TOKENIZED: 1,
    ASSIGNED: 2,
    PREFILL_STARTED: 4,
    LEASE_GRANTED: 5,
    FIRST_TOKEN: 30,
    FIRST_TOKEN_SENT: 31,
    COMMITTED: 33,
    DECODE_STARTED: 35,
    LAST_TOKEN: 90,
    ENDED: 91,
}
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[OtlpCollector]:
    with OtlpCollector() as collector:
        yield collector


def request(traceparent: str = "", tracestate: str = "", outcome: str = "length", failure: str = "") -> TracedRequest:
    return TracedRequest.of(report(traceparent, tracestate, outcome, failure))


def report(traceparent: str = "", tracestate: str = "", outcome: str = "length", failure: str = "") -> RequestReport:
    tracker = RequestTracker(
        "life-1",
        request_spec(
            range(12),
            SamplingParams(9, temperature=0.5, top_k=7),
            client_request_id="mine",
            trace_context=TraceContext(traceparent, tracestate) if traceparent else None,
            moments={name: START_NS + ms * MS for name, ms in MOMENTS_MS.items()},
        ),
        state=RequestState.FAILED if failure else RequestState.FINISHED,
        attempt=0,
        prefill_worker_id="prefill-0",
        decode_worker_id="decode-1",
        prompt_cached_len=8,
        prompt_loaded=TierHits(host=4, disk=2),
        failure=failure,
    )
    return RequestReport(tracker, outcome, 9, 9, phase_timings(tracker.moments))


def test_a_request_is_a_server_span_with_its_phases_inside(collector: OtlpCollector) -> None:
    exporter = OtlpExporter(collector.endpoint, "the-model", "router-3")
    assert exporter.export([request(f"00-{TRACE_ID}-{PARENT_ID}-01", "vendor=value")])
    server, *phases = sorted(collector.spans, key=lambda span: (span.kind != Span.SPAN_KIND_SERVER, span.name))
    assert (server.trace_id.hex(), server.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert (server.name, server.trace_state) == ("text_completion the-model", "vendor=value")
    assert (server.start_time_unix_nano, server.end_time_unix_nano) == (START_NS, START_NS + 91 * MS)
    said = attributes_of(server)
    assert said.pop("gen_ai.response.time_to_first_chunk") == pytest.approx(0.031)
    assert said == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": "the-model",
        "gen_ai.response.model": "the-model",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.response.id": "mine",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "gen_ai.usage.output_tokens": 9,
        "tandem.host_tokens": 4,
        "tandem.disk_tokens": 2,
        "tandem.peer_tokens": 0,
        "tandem.request_id": "life-1",
        "tandem.outcome": "length",
        "tandem.attempts": 1,
        "tandem.prefill_worker": "prefill-0",
        "tandem.decode_worker": "decode-1",
    }
    assert {span.parent_span_id for span in phases} == {server.span_id}
    assert {span.trace_id for span in phases} == {server.trace_id}
    times = {
        span.name: ((span.start_time_unix_nano - START_NS) // MS, (span.end_time_unix_nano - START_NS) // MS)
        for span in phases
    }
    assert times["prefill"] == (4, 30) and times["lease"] == (4, 5) and times["decode"] == (35, 90)
    assert times.keys().isdisjoint({"e2e", "ttft"})
    workers = {span.name: attributes_of(span) for span in phases}
    assert workers["tokenize"] == {}
    assert workers["prefill"]["tandem.prefill_worker"] == "prefill-0"
    assert workers["decode"] == {"tandem.decode_worker": "decode-1"}
    resource = attributes_of(collector.requests[0].resource_spans[0].resource)
    assert (resource["service.name"], resource["service.instance.id"]) == ("tandem", "router-3")


@pytest.mark.parametrize(
    "traceparent", ["", "nonsense", f"00-{'0' * 32}-{PARENT_ID}-01", f"ff-{TRACE_ID}-{PARENT_ID}-01", "00-x-y-01"]
)
def test_without_a_valid_context_a_request_is_a_trace_of_its_own(collector: OtlpCollector, traceparent: str) -> None:
    assert OtlpExporter(collector.endpoint, "m", "r").export([request(traceparent)])
    (server,) = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert server.parent_span_id == b"" and len(server.trace_id) == 16
    assert server.trace_id.hex() not in (TRACE_ID, "0" * 32)


def test_a_state_that_is_not_valid_does_not_come_into_the_log(
    collector: OtlpCollector, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("opentelemetry.trace").setLevel(logging.NOTSET)
    exporter = OtlpExporter(collector.endpoint, "m", "r")
    for tracestate in ("no-value", "\x9b31m=1", ",".join(f"k{number}=1" for number in range(40)), "a=1,a=2"):
        assert exporter.export([request(f"00-{TRACE_ID}-{PARENT_ID}-01", tracestate)])
    own = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert {span.trace_id.hex() for span in own} == {TRACE_ID}
    assert caplog.text == ""


def test_what_the_client_does_not_sample_is_not_sent(collector: OtlpCollector) -> None:
    exporter = OtlpExporter(collector.endpoint, "m", "r")
    assert exporter.export([request(f"00-{TRACE_ID}-{PARENT_ID}-00")])
    assert collector.requests == []


def test_the_environment_says_what_the_sdk_leaves_open(
    collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    exporter = OtlpExporter(collector.endpoint, "m", "r")
    assert exporter.export([request(), request(f"00-{TRACE_ID}-{PARENT_ID}-01")])
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    assert attributes_of(collector.requests[0].resource_spans[0].resource)["service.name"] == "ours"
    assert collector.headers[0]["authorization"] == "Bearer secret"


def test_headers_that_cannot_be_read_are_not_told(
    collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A header without a name is dropped.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "the-secret")
    logging.getLogger("opentelemetry.util.re").setLevel(logging.NOTSET)
    assert OtlpExporter(collector.endpoint, "m", "r").export([request()])
    # This value cannot be sent.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=the%0Asecret")
    exporter = OtlpExporter(collector.endpoint, "m", "r")
    spans = RequestSpans(exporter.export, lambda reason, num_requests: None)
    spans.put(report())
    spans.close()
    assert "secret" not in caplog.text and len(collector.requests) == 1


def test_a_failed_request_is_an_error(collector: OtlpCollector) -> None:
    failed = request(outcome="unavailable", failure="no workers")
    assert OtlpExporter(collector.endpoint, "m", "r").export([failed])
    (server,) = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert (server.status.code, server.status.message) == (Status.STATUS_CODE_ERROR, "no workers")
    said = attributes_of(server)
    assert said["error.type"] == "unavailable" and "gen_ai.response.finish_reasons" not in said


def test_a_collector_that_refuses_or_is_away_is_told_of(collector: OtlpCollector) -> None:
    collector.status = 400
    assert not OtlpExporter(collector.endpoint, "m", "r").export([request()])
    assert collector.requests == []
