"""A client's names for its request, in headers or gRPC metadata."""

import re
import uuid
from contextvars import ContextVar
from typing import NamedTuple

REQUEST_ID_HEADER = "x-request-id"
# For headers and log lines.
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
# A traceparent has 55 characters. Vendors extend a tracestate; longer ones are dropped.
MAX_TRACEPARENT_LEN = 128
MAX_TRACESTATE_LEN = 512


def is_request_id(text: str) -> bool:
    return _REQUEST_ID.fullmatch(text) is not None


def request_id_of(given: str | None) -> str:
    """Returns a new id for an unusable one, which is no error: proxies set such headers too."""
    return given if given is not None and is_request_id(given) else uuid.uuid4().hex


class TraceContext(NamedTuple):
    """Unchecked headers of W3C's trace context."""

    traceparent: str
    tracestate: str = ""


current_trace_context: ContextVar[TraceContext | None] = ContextVar("current_trace_context", default=None)


def trace_context_of(traceparent: str | None, tracestate: str | None) -> TraceContext | None:
    if not traceparent or len(traceparent) > MAX_TRACEPARENT_LEN:
        return None
    return TraceContext(traceparent, tracestate if tracestate and len(tracestate) <= MAX_TRACESTATE_LEN else "")
