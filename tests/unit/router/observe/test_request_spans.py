import asyncio
import pickle
import threading
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from tandem.lifecycle import ENDED, RECEIVED, phase_timings
from tandem.router.observe import request_spans
from tandem.router.observe.otlp import OtlpExporter
from tandem.router.observe.request_spans import EXPORT_FAILED, QUEUE_FULL, RequestSpans, TracedRequest
from tandem.router.requests.client_ids import MAX_TRACESTATE_LEN, TraceContext, trace_context_of
from tandem.router.requests.tracker import RequestReport, RequestTracker
from tandem.sampling_params import SamplingParams
from tandem.v1 import inference_pb2 as pb
from tests.fakes.http_cluster import HttpCluster
from tests.fakes.http_doors import call
from tests.fakes.otlp_collector import OtlpCollector, attributes_of
from tests.fakes.request_spec import request_spec
from tests.unit.router.frontends.test_grpc import Context, GrpcHarness, first

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_spans, "INTERVAL_S", 0.02)


def ended(name: str) -> RequestReport:
    tracker = RequestTracker(name, request_spec((1,), SamplingParams(1), moments={RECEIVED: 1, ENDED: 2}))
    return report(tracker, "stop")


def report(tracker: RequestTracker, outcome: str) -> RequestReport:
    return RequestReport(tracker, outcome, 1, 1, phase_timings(tracker.moments))


class Exporter:
    """Attributes: may_go_on: awaited before each batch; works: result of `export`, or its exception."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.may_go_on = threading.Event()
        self.works: bool | Exception = True
        self.dropped: Counter[str] = Counter()

    def export(self, requests: Sequence[TracedRequest]) -> bool:
        self.may_go_on.wait(10.0)
        if isinstance(self.works, Exception):
            raise self.works
        self.names += [request.request_id for request in requests]
        return self.works

    def drop(self, reason: str, num_requests: int) -> None:
        self.dropped[reason] += num_requests


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_slow_collector_keeps_nobody_waiting_and_what_does_not_fit_is_counted() -> None:
    exporter = Exporter()
    spans = RequestSpans(exporter.export, exporter.drop, max_queued=5)
    spans.put(ended("first"))
    wait_until(lambda: not spans._queue)
    before = time.monotonic()
    for number in range(8):
        spans.put(ended(str(number)))
    assert time.monotonic() - before < 1.0
    assert exporter.dropped == {QUEUE_FULL: 3}
    exporter.may_go_on.set()
    spans.close()
    assert exporter.names == ["first", "0", "1", "2", "3", "4"]


@pytest.mark.parametrize("failure", [False, ValueError("whatever")])
def test_what_cannot_be_sent_is_counted_and_the_next_is_sent(failure: bool | Exception) -> None:
    exporter = Exporter()
    exporter.works = failure
    exporter.may_go_on.set()
    spans = RequestSpans(exporter.export, exporter.drop)
    spans.put(ended("lost"))
    wait_until(lambda: exporter.dropped == {EXPORT_FAILED: 1})
    exporter.works, exporter.names = True, []
    spans.put(ended("sent"))
    wait_until(lambda: exporter.names == ["sent"])
    spans.close()


def test_closing_does_not_wait_for_a_collector_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_spans, "STOP_TIMEOUT_S", 0.2)
    exporter = Exporter()
    spans = RequestSpans(exporter.export, exporter.drop)
    spans.put(ended("first"))
    before = time.monotonic()
    spans.close()
    assert time.monotonic() - before < 5.0
    exporter.may_go_on.set()


def test_what_waits_for_a_collector_keeps_nothing_that_a_client_can_make_large() -> None:
    sampling = SamplingParams(
        1, logit_bias=tuple((token_id, 1.0) for token_id in range(50_000)), grammar="x" * 60_000, stop_token_ids=(1,)
    )
    tracker = RequestTracker("life-1", request_spec(range(100_000), sampling, moments={RECEIVED: 1, ENDED: 2}))
    tracker.failure = "y" * 60_000
    assert len(pickle.dumps(TracedRequest.of(report(tracker, "unavailable")))) < 4000


def test_what_is_no_trace_context() -> None:
    assert trace_context_of(None, "a=b") is None
    assert trace_context_of("x" * 1000, None) is None
    assert trace_context_of(TRACEPARENT, None) == TraceContext(TRACEPARENT)
    assert trace_context_of(TRACEPARENT, "a=" + "b" * MAX_TRACESTATE_LEN) == TraceContext(TRACEPARENT)


def test_a_chat_over_http_is_part_of_its_clients_trace() -> None:
    async def scenario(collector: OtlpCollector) -> None:
        cluster = HttpCluster([104, 105], num_routers=1)
        router = cluster.routers[0].router
        spans = RequestSpans(OtlpExporter(collector.endpoint, "fake", "r").export, router.metrics.spans_dropped)
        router.observers.subscribe(spans.put)
        body = {"model": "fake", "prompt": "hi", "max_tokens": 2}
        headers = {"traceparent": TRACEPARENT, "tracestate": "a=b"}
        assert (await call(cluster, "/v1/completions", body, headers=headers)).status == 200
        assert (await call(cluster, "/v1/completions", body)).status == 200
        await asyncio.to_thread(spans.close)

    with OtlpCollector() as collector:
        asyncio.run(scenario(collector))
    own = [span for span in collector.spans if "gen_ai.request.model" in attributes_of(span)]
    assert [span.trace_id.hex() == TRACE_ID for span in own] == [True, False]
    assert (own[0].parent_span_id.hex(), own[0].trace_state) == (PARENT_ID, "a=b")
    assert [attributes_of(span)["gen_ai.usage.output_tokens"] for span in own] == [2, 2]


def test_a_call_over_grpc_is_part_of_its_clients_trace() -> None:
    async def scenario(collector: OtlpCollector) -> None:
        harness = GrpcHarness()
        router = harness.router
        spans = RequestSpans(OtlpExporter(collector.endpoint, "fake", "r").export, router.metrics.spans_dropped)
        router.observers.subscribe(spans.put)
        request = pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(max_tokens=2))
        context = Context(traceparent=TRACEPARENT)
        served = asyncio.create_task(harness.service.Generate(request, context))
        await harness.settle()
        request_id = harness.p.sent[-1].request_id
        harness.p.say(first(request_id, 0, 0, 104))
        await harness.settle()
        served.cancel()
        await asyncio.gather(served, return_exceptions=True)
        await asyncio.to_thread(spans.close)

    with OtlpCollector() as collector:
        asyncio.run(scenario(collector))
    (own,) = [span for span in collector.spans if "gen_ai.request.model" in attributes_of(span)]
    assert (own.trace_id.hex(), own.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert attributes_of(own)["tandem.outcome"] == "abort"
