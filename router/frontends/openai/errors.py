"""OpenAI's form of errors: an HTTP status and an error object."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.responses import Response

from tandem.router.errors import (
    InternalError,
    InvalidRequestError,
    LostStreamError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
    RequestTooLargeError,
    UnauthenticatedError,
    UnavailableError,
    UnknownConversationError,
    UnknownModelError,
    UnknownPreviousResponseError,
    UnknownResponseError,
    UnknownStreamError,
    shortened,
)
from tandem.router.frontends.openai.lenient import UNSERVED
from tandem.router.frontends.openai.schema import TAG_MARK
from tandem.router.frontends.openai.unserved import PARTS


class HttpError(NamedTuple):
    status: int
    type: str
    code: str | None


# The first matching class counts.
HTTP_ERRORS: tuple[tuple[type[RequestError], HttpError], ...] = (
    (UnknownModelError, HttpError(404, "invalid_request_error", "model_not_found")),
    (UnknownStreamError, HttpError(404, "invalid_request_error", "stream_not_found")),
    (UnknownPreviousResponseError, HttpError(404, "invalid_request_error", "previous_response_not_found")),
    (UnknownConversationError, HttpError(404, "invalid_request_error", "conversation_not_found")),
    (UnknownResponseError, HttpError(404, "invalid_request_error", "response_not_found")),
    (LostStreamError, HttpError(410, "invalid_request_error", "stream_lost")),
    (RequestTooLargeError, HttpError(400, "invalid_request_error", "context_length_exceeded")),
    (InvalidRequestError, HttpError(400, "invalid_request_error", None)),
    (UnauthenticatedError, HttpError(401, "authentication_error", "invalid_api_key")),
    (OverloadedError, HttpError(429, "rate_limit_error", "overloaded")),
    (RequestTimeoutError, HttpError(504, "timeout_error", "timeout")),
    (UnavailableError, HttpError(503, "server_error", "unavailable")),
    (InternalError, HttpError(500, "server_error", "internal")),
)


# Seconds by status: overload passes within a request's time, workers restart within seconds.
RETRY_AFTER_S = {429: "1", 503: "2"}


def json_response(content: Any, status: int = 200) -> Response:
    response = Response(json.dumps(content, separators=(",", ":")), status, media_type="application/json")
    if status in RETRY_AFTER_S:
        response.headers["retry-after"] = RETRY_AFTER_S[status]
    return response


def json_text_response(text: str) -> Response:
    return Response(text, media_type="application/json")


def described_error(body: type[BaseModel], description: str) -> dict[str, Any]:
    """Returns an error response for the OpenAPI document. FastAPI would build a validator for each of them per route,
    which takes most of the application's start."""
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def error_object(error: RequestError) -> dict[str, Any]:
    http = http_error(error)
    param = getattr(error, "param", "") or None
    return {"error": {"message": str(error), "type": http.type, "param": param, "code": http.code}}


def error_response(error: RequestError) -> Response:
    response = json_response(error_object(error), http_error(error).status)
    if isinstance(error, UnauthenticatedError):
        response.headers["www-authenticate"] = "Bearer"
    return response


def status_response(
    status: int, message: str, headers: Mapping[str, str] | None = None, param: str | None = None
) -> Response:
    """Answers before there is a request: unknown path, oversized body, no JSON."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": shortened(message), "type": kind, "param": param, "code": None}}
    response = json_response(body, status)
    response.headers.update(headers or {})
    return response


def invalid_body(error: RequestValidationError) -> InvalidRequestError:
    first = error.errors()[0]
    # The path begins with "body".
    return invalid_field(first, first["loc"][1:])


def invalid_field(first: Mapping[str, Any], path: Sequence[int | str]) -> InvalidRequestError:
    names = [str(part) for part in path if not str(part).startswith(TAG_MARK)]
    message = str(first["msg"]).removeprefix("Value error, ")
    if names[-1:] == ["type"] and isinstance(first.get("input"), str):
        # A content part other than text.
        message = PARTS.get(first["input"], message)
    if first["type"] == UNSERVED:
        names.append(first["ctx"]["name"])
    if not names:
        return InvalidRequestError("the body must be a JSON object, sent as application/json")
    return InvalidRequestError(f"{'.'.join(names)}: {message}", names[0])


def http_error(error: RequestError) -> HttpError:
    return next(http for kind, http in HTTP_ERRORS if isinstance(error, kind))
