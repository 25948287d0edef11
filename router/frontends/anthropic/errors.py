"""Anthropic's form of errors."""

from typing import Any

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


# Anthropic's packages send the whole conversation upon this code.
_REFUSES_THREADS = "thread_unsupported_request"
_THREAD_FIELDS = ("thread", "compaction")


def error_body(status: int, message: str, param: str | None, request_id: str) -> dict[str, Any]:
    """Args: param: the invalid field; it goes into the message."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    if param and param not in message:
        message = f"{param}: {message}"
    error: dict[str, Any] = {"type": kind, "message": message}
    if param in _THREAD_FIELDS:
        error["details"] = {"error_code": _REFUSES_THREADS, "unsupported": [param]}
    return {"type": "error", "error": error, "request_id": request_id}
