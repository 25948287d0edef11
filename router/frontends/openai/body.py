"""A request's body: JSON to the letter, with errors that say what is wrong with it."""

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

# Most bodies have no escaped surrogate, and need no second look.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonRoute(APIRoute):
    """A route whose requests read their bodies with `parse_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


class _JsonRequest(Request):
    async def json(self) -> Any:
        return parse_json(await self.body())


def parse_json(body: bytes) -> Any:
    """Raises HTTPException: the body is not JSON, or holds what cannot be passed on."""
    try:
        text = body.decode()
        content = json.loads(text, parse_constant=_refuse_constant)
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


def _refuse_constant(name: str) -> Any:
    raise _refusal(f"the body is not valid JSON: {name} is no number there")


def _refusal(message: str) -> HTTPException:
    return HTTPException(400, message)
