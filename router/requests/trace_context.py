"""Which trace of its client's a request belongs to: W3C's trace context, as its headers or its metadata say it."""

from contextvars import ContextVar
from typing import NamedTuple

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
# A traceparent has 55 characters so far. Vendors add to a tracestate, and nobody need pass on more than this.
MAX_TRACEPARENT_LEN = 128
MAX_TRACESTATE_LEN = 512


class TraceContext(NamedTuple):
    """As the client sent it; whoever makes spans of it looks whether it is valid."""

    traceparent: str
    tracestate: str = ""


# Of the request that the current task serves; None: its client has said nothing.
current_trace_context: ContextVar[TraceContext | None] = ContextVar("current_trace_context", default=None)


def trace_context_of(traceparent: str | None, tracestate: str | None) -> TraceContext | None:
    """Args: both as the headers of these names are, if they are there."""
    if not traceparent or len(traceparent) > MAX_TRACEPARENT_LEN:
        return None
    return TraceContext(traceparent, tracestate if tracestate and len(tracestate) <= MAX_TRACESTATE_LEN else "")
