"""Parses bodies as strict JSON, after bounding their cost.

Text is cheap, but every number, string and object becomes a Python object, and a body can hold millions.
"""

import json
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope

from tandem.router.errors import OverloadedError
from tandem.router.frontends.openai.off_loop import MAX_INLINE_BYTES, OffLoop
from tandem.router.text.prompt_encoder import MAX_MESSAGES
from tandem.sampling_params import MAX_NUM_ALLOWED, MAX_NUM_BIASED, MAX_NUM_STOP_TOKENS

P = ParamSpec("P")
T = TypeVar("T")

# More than the longest chat has.
MAX_CONTAINERS = 2**14
MAX_STRINGS = 2**15
MAX_OTHER_ITEMS = MAX_CONTAINERS + MAX_STRINGS

# An integer of 4,000 digits takes 100 us, and a body may hold two thousand; meanwhile no other thread runs.
MAX_DIGITS = 256
_STRIDE = 32
_DIGITS = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else 0 for byte in range(256))
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class FieldRefusal(HTTPException):
    def __init__(self, message: str, param: str) -> None:
        super().__init__(400, message)
        self.param = param


class _InvalidBodyError(HTTPException):
    """Passes through the framework, which hides other exceptions. Attributes: errors: as RequestValidationError has
    them."""

    def __init__(self, errors: Sequence[Any]) -> None:
        super().__init__(400)
        self.errors = errors


class JsonRoute(APIRoute):
    """Parses and validates large bodies beside the loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(_JsonRequest(request.scope, request.receive, self.body_field))
            except _InvalidBodyError as error:
                raise RequestValidationError(error.errors) from None

        return handle


class _JsonRequest(Request):
    def __init__(self, scope: Scope, receive: Receive, body_field: Any) -> None:
        """Args: body_field: the framework's field of the whole body, or None."""
        super().__init__(scope, receive)
        self._body_field = body_field

    async def json(self) -> Any:
        """Returns the parsed body; of a large one, the validated model, which the framework takes as it is."""
        body = await self.body()
        self.state.num_bytes = len(body)
        if len(body) <= MAX_INLINE_BYTES:
            return parse_json(body)
        try:
            return await run_beside(self, self._read_large, body)
        except OverloadedError as error:
            raise HTTPException(503, str(error)) from None

    def _read_large(self, body: bytes) -> Any:
        check_structure(body, self.app.state.max_items)
        content = parse_json(body)
        if self._body_field is None:
            return content
        content, errors = self._body_field.validate(content, {}, loc=("body",))
        if errors:
            raise _InvalidBodyError(errors)
        return content


async def run_beside(request: Request, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls `function` as OffLoop.run, by the size of the request's body and of the conversation that it continues."""
    off_loop: OffLoop = request.app.state.off_loop
    return await off_loop.run(request.state.client, request.state.num_bytes, function, *args, **kwargs)


def check_structure(body: bytes, max_items: int) -> None:
    """Scans JSON as bytes: a few megabytes take a few milliseconds. Raises HTTPException."""
    num_containers, num_items = body.count(b"[") + body.count(b"{"), body.count(b",")
    num_quotes = body.count(b'"')
    if num_containers > MAX_CONTAINERS or num_items > max_items or num_quotes > 2 * MAX_STRINGS:
        # Most may be inside strings. Outside of strings, JSON has no backslash.
        bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
        num_quotes = bare.count(b'"')
        if num_quotes <= 2 * MAX_STRINGS:
            outside = b"".join(bare.split(b'"')[::2])
            num_containers, num_items = outside.count(b"[") + outside.count(b"{"), outside.count(b",")
    for name, number, limit in (
        ("strings", num_quotes // 2, MAX_STRINGS),
        ("lists and objects", num_containers, MAX_CONTAINERS),
        ("items", num_items, max_items),
    ):
        if number > limit:
            raise _culprit(body, max_items) or _refusal(
                f"the body has more than {limit} {name}; one request may not have so many"
            )


def _culprit(body: bytes, max_items: int) -> HTTPException | None:
    for field, end, item, limit in (
        ("logit_bias", b"}", b":", MAX_NUM_BIASED),
        ("stop_token_ids", b"]", b",", MAX_NUM_STOP_TOKENS),
        ("allowed_token_ids", b"]", b",", MAX_NUM_ALLOWED),
        ("messages", b"]", b'"role"', MAX_MESSAGES),
        ("prompt", b"]", b",", max_items),
    ):
        value = body.partition(f'"{field}"'.encode())[2].lstrip(b": \t\r\n")
        if value.startswith((b"[", b"{")) and value.partition(end)[0].count(item) > limit:
            return FieldRefusal(f"{field}: at most {limit} items are taken", field)
    return None


def parse_json(body: bytes) -> Any:
    """Raises HTTPException."""
    try:
        text = body.decode()
        parse_int = _short_int if _may_have_long_numbers(body) else None
        content = json.loads(text, parse_constant=_refuse_constant, parse_int=parse_int)
        if _SURROGATE.search(text):
            json.dumps(content, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise _refusal(f"the body is not valid UTF-8 at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise _refusal("the body holds a lone surrogate, which is half a character") from error
    except json.JSONDecodeError as error:
        raise _refusal(f"the body is not valid JSON at character {error.pos}: {error.msg}") from error
    except ValueError as error:
        raise _refusal("the body holds a number with too many digits") from error
    except RecursionError as error:
        raise _refusal("the body is nested too deeply") from error
    return content


def _may_have_long_numbers(body: bytes) -> bool:
    """Whether more than MAX_DIGITS digits follow each other, perhaps within a string."""
    samples = body[::_STRIDE].translate(_DIGITS)
    return b"0" * (MAX_DIGITS // _STRIDE) in samples and b"0" * (MAX_DIGITS + 1) in body.translate(_DIGITS)


def _short_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError
    return int(text)


def _refuse_constant(name: str) -> Any:
    raise _refusal(f"the body is not valid JSON: {name} is no number there")


def _refusal(message: str) -> HTTPException:
    return HTTPException(400, message)
