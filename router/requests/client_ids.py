"""The names that a client gives its request: a request id, and W3C's trace context (headers or gRPC metadata)."""

import re
import uuid
from contextvars import ContextVar
from typing import NamedTuple

REQUEST_ID_HEADER = "x-request-id"
# Printable ASCII without spaces: it stands in headers and in lines of logs.
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
# A traceparent has 55 characters so far. Vendors add to a tracestate, and nobody need pass on more than this.
MAX_TRACEPARENT_LEN = 128
MAX_TRACESTATE_LEN = 512


def is_request_id(text: str) -> bool:
    """Whether a client's name of a request can be taken as it is."""
    return _REQUEST_ID.fullmatch(text) is not None


def request_id_of(given: str | None) -> str:
    """The id of a request: its client's, if there is one that can be taken, or a new one. Proxies on the way set such
    headers too, so that one that cannot be taken is no error of the client's."""
    return given if given is not None and is_request_id(given) else uuid.uuid4().hex


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
