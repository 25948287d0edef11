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


def error_body(status: int, message: str, param: str | None, request_id: str) -> dict[str, Any]:
    """Args: param: the invalid field; it goes into the message."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    if param and param not in message:
        message = f"{param}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
