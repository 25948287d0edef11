"""Spans of requests over OTLP. Imported only by a router with an endpoint."""

import logging
import time
from collections.abc import Iterator, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from tandem import __version__
from tandem.lifecycle import DECODE_MOMENTS, PHASES, PREFILL_MOMENTS, TOTALS
from tandem.router.observe.request_spans import TracedRequest
from tandem.router.requests.client_ids import TRACEPARENT, TRACESTATE, TraceContext

_STARTS = {spec.name: spec.start for spec in PHASES}
_SUCCESSES = ("stop", "length", "embedded")


class _Ended(SpanProcessor):
    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._spans.append(span)

    def take(self) -> list[ReadableSpan]:
        spans, self._spans = self._spans, []
        return spans


class OtlpExporter:
    """Used by one thread."""

    def __init__(self, endpoint: str, model: str, router_id: str) -> None:
        self._model = model
        self._ended = _Ended()
        # The environment's names take precedence.
        resource = Resource(
            {"service.name": "tandem", "service.version": __version__, "service.instance.id": router_id}
        ).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("tandem", __version__)
        self._propagator = TraceContextTextMapPropagator()
        # The exporter repeats its error for each batch; the caller logs it once. The parsers of headers and trace
        # contexts quote invalid input, which may be secrets or clients' text.
        for name in ("opentelemetry.exporter", "opentelemetry.util.re", "opentelemetry.trace"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter(endpoint)

    def export(self, requests: Sequence[TracedRequest]) -> bool:
        """Returns whether the collector took the spans."""
        for request in requests:
            self._make_spans(request)
            # Yield the GIL to the router's event loop.
            time.sleep(0)
        spans = self._ended.take()
        return not spans or self._exporter.export(spans) is SpanExportResult.SUCCESS

    def _make_spans(self, request: TracedRequest) -> None:
        span = self._tracer.start_span(
            f"{_operation(request)} {self._model}",
            self._parent(request.trace_context),
            SpanKind.SERVER,
            dict(self._attributes(request)),
            start_time=request.received_ns,
        )
        if span.is_recording():
            for timing in request.timings:
                if timing.name == "ttft":
                    span.set_attribute("gen_ai.response.time_to_first_chunk", timing.duration_ms / 1e3)
            if request.outcome not in _SUCCESSES:
                span.set_attribute("error.type", request.outcome)
                span.set_status(Status(StatusCode.ERROR, request.error or request.outcome))
            inside = trace.set_span_in_context(span, Context())
            for timing in request.timings:
                if timing.name in TOTALS:
                    # The request's span has it.
                    continue
                start_ns = request.received_ns + round(timing.start_ms * 1e6)
                child = self._tracer.start_span(
                    timing.name, inside, SpanKind.INTERNAL, _workers(request, timing.name), start_time=start_ns
                )
                child.end(start_ns + round(timing.duration_ms * 1e6))
        span.end(request.ended_ns)

    def _parent(self, context: TraceContext | None) -> Context:
        if context is None:
            return Context()
        carrier = {TRACEPARENT: context.traceparent, TRACESTATE: context.tracestate}
        return self._propagator.extract(carrier, Context())

    def _attributes(self, request: TracedRequest) -> Iterator[tuple[str, AttributeValue]]:
        yield "gen_ai.operation.name", _operation(request)
        yield "gen_ai.provider.name", "tandem"
        yield "gen_ai.request.model", self._model
        yield "gen_ai.response.model", self._model
        if not request.embeds:
            yield "gen_ai.request.max_tokens", request.max_tokens
            yield "gen_ai.request.temperature", request.temperature
            yield "gen_ai.request.top_p", request.top_p
            yield "gen_ai.request.frequency_penalty", request.frequency_penalty
            yield "gen_ai.request.presence_penalty", request.presence_penalty
            if request.top_k > 0:
                yield "gen_ai.request.top_k", request.top_k
        if request.client_request_id:
            yield "gen_ai.response.id", request.client_request_id
        if request.outcome in _SUCCESSES and not request.embeds:
            yield "gen_ai.response.finish_reasons", (request.outcome,)
        yield "gen_ai.usage.input_tokens", request.num_prompt_tokens
        yield "gen_ai.usage.cache_read.input_tokens", request.num_cached_tokens
        for name, count in request.loaded.counts().items():
            yield f"tandem.{name}", count
        yield "gen_ai.usage.output_tokens", request.num_output_tokens
        yield "tandem.request_id", request.request_id
        yield "tandem.outcome", request.outcome
        yield "tandem.attempts", request.num_attempts
        if request.prefill_worker_id:
            yield "tandem.prefill_worker", request.prefill_worker_id
        if request.decode_worker_id:
            yield "tandem.decode_worker", request.decode_worker_id


def _operation(request: TracedRequest) -> str:
    return "embeddings" if request.embeds else "text_completion"


def _workers(request: TracedRequest, phase: str) -> dict[str, AttributeValue]:
    start = _STARTS[phase]
    if start in PREFILL_MOMENTS:
        return {"tandem.prefill_worker": request.prefill_worker_id, "tandem.decode_worker": request.decode_worker_id}
    return {"tandem.decode_worker": request.decode_worker_id} if start in DECODE_MOMENTS else {}
