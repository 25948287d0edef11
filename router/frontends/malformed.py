"""Requests that cannot be parsed: gRPC would say UNKNOWN and write a traceback, as if it were our fault."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

MALFORMED_MESSAGE = "the request is malformed: no message of its type, or text that is not UTF-8"
# This stands for such a request.
MALFORMED: Any = object()


class MalformedRequestInterceptor(grpc.aio.ServerInterceptor):
    """Refuses requests that cannot be parsed with INVALID_ARGUMENT. For one service it does not refuse them itself but
    gives that MALFORMED in their place."""

    def __init__(self, own_service: str) -> None:
        """Args: own_service: full name of the one that knows MALFORMED; others are given parsed requests alone."""
        self._own_prefix = f"/{own_service}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        parse = handler.request_deserializer

        def deserialize(data: bytes) -> Any:
            try:
                return parse(data)
            except DecodeError:
                return MALFORMED

        handler = handler._replace(request_deserializer=deserialize)
        return handler if handler_call_details.method.startswith(self._own_prefix) else _refusing(handler)


def _refusing(handler: Any) -> grpc.RpcMethodHandler:
    """The handlers of grpcio's own services: health's methods, coroutines of one request; reflection's, an asynchronous
    generator of many."""
    if handler.stream_stream is not None:

        async def answer_all(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async for response in handler.stream_stream(_parsed(requests, context), context):
                yield response

        return handler._replace(stream_stream=answer_all)
    kind = "unary_unary" if handler.unary_unary is not None else "unary_stream"
    inner = getattr(handler, kind)

    async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
        if request is MALFORMED:
            await _refuse(context)
        return await inner(request, context)

    return handler._replace(**{kind: answer})


async def _parsed(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
    async for request in requests:
        if request is MALFORMED:
            await _refuse(context)
        yield request


async def _refuse(context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, MALFORMED_MESSAGE)
