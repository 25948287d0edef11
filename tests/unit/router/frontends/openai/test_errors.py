"""OpenAI's form of errors."""

import json
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from tandem.router.errors import (
    InvalidRequestError,
    LostStreamError,
    OverloadedError,
    RequestTooLargeError,
    UnknownModelError,
    UnknownStreamError,
)
from tandem.router.frontends.openai.errors import error_response, invalid_body, status_response
from tandem.router.frontends.openai.schema import ChatCompletionRequest, CompletionRequest


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "param"),
    [
        (InvalidRequestError("why", "top_p"), 400, "invalid_request_error", None, "top_p"),
        (
            RequestTooLargeError("why", "prompt"),
            400,
            "invalid_request_error",
            "context_length_exceeded",
            "prompt",
        ),
        (UnknownModelError("why", "model"), 404, "invalid_request_error", "model_not_found", "model"),
        (UnknownStreamError("why", "x"), 404, "invalid_request_error", "stream_not_found", "x"),
        (LostStreamError("why", "x"), 410, "invalid_request_error", "stream_lost", "x"),
        (OverloadedError("why"), 429, "rate_limit_error", "overloaded", None),
    ],
)
def test_an_error_object(error: Any, status: int, kind: str, code: str | None, param: str | None) -> None:
    response = error_response(error)
    expected = {"message": "why", "type": kind, "param": param, "code": code}
    assert (response.status_code, json.loads(bytes(response.body))) == (status, {"error": expected})
    assert ("retry-after" in response.headers) == (status == 429)


def test_what_is_no_request_has_an_error_object_too() -> None:
    response = status_response(405, "x" * 1000, {"allow": "GET"})
    error = json.loads(bytes(response.body))["error"]
    assert (response.status_code, response.headers["allow"], len(error["message"])) == (405, "GET", 500)


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({}, "prompt: Field required", "prompt"),
        ({"prompt": [1, -1]}, "prompt.1: Input should be greater than or equal to 0", "prompt"),
        (
            {"prompt": "hi", "bad_words": ["x"]},
            "bad_words: forbidding words is not supported by this server",
            "bad_words",
        ),
        ({"messages": [{"role": "user"}]}, "messages.0.content: a message of role user needs one", "messages"),
        ("hi", "the body must be a JSON object, sent as application/json", ""),
    ],
)
def test_the_first_thing_that_is_wrong_in_one_line(body: Any, message: str, param: str) -> None:
    kind = ChatCompletionRequest if "messages" in body else CompletionRequest
    with pytest.raises(ValidationError) as invalid:
        kind.model_validate(body)
    # The framework puts "body" in front.
    errors = [{**error, "loc": ("body", *error["loc"])} for error in invalid.value.errors()]
    refusal = invalid_body(RequestValidationError(errors))
    assert (str(refusal), refusal.param) == (message, param)
