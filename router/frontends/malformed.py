"""Refuses requests that cannot be parsed, which gRPC reports as UNKNOWN with a traceback, and requests too slow to
parse."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

MALFORMED_MESSAGE = "the request is malformed: no message of its type, or text that is not UTF-8"


@dataclass(frozen=True, slots=True)
class Malformed:
    """Stands in for a refused request."""

    message: str = MALFORMED_MESSAGE


class MalformedRequestInterceptor(grpc.aio.ServerInterceptor):
    """Refuses with INVALID_ARGUMENT. One service gets a Malformed instead."""

    def __init__(self, own_service: str, check: Callable[[str, bytes], None]) -> None:
        """
        Args:
            own_service: the service that handles Malformed.
            check: checks a request of one of that service's methods before parsing; raises ValueError.
        """
        self._own_prefix = f"/{own_service}/"
        self._check = check

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        parse = handler.request_deserializer
        is_own = handler_call_details.method.startswith(self._own_prefix)
        method = handler_call_details.method.removeprefix(self._own_prefix)

        def deserialize(data: bytes) -> Any:
            try:
                if is_own:
                    self._check(method, data)
                return parse(data)
            except DecodeError:
                return Malformed()
            except ValueError as error:
                return Malformed(str(error))

        handler = handler._replace(request_deserializer=deserialize)
        return handler if is_own else _refusing(handler)


def _refusing(handler: Any) -> grpc.RpcMethodHandler:
    """Wraps health's unary coroutines and reflection's asynchronous generator."""
    if handler.stream_stream is not None:

        async def answer_all(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async for response in handler.stream_stream(_parsed(requests, context), context):
                yield response

        return handler._replace(stream_stream=answer_all)
    kind = "unary_unary" if handler.unary_unary is not None else "unary_stream"
    inner = getattr(handler, kind)

    async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
        if isinstance(request, Malformed):
            await _refuse(request, context)
        return await inner(request, context)

    return handler._replace(**{kind: answer})


async def _parsed(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, Malformed):
            await _refuse(request, context)
        yield request


async def _refuse(request: Malformed, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, request.message)
