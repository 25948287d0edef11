"""Reads gRPC requests after authentication, and only as many at once as memory allows.

By default gRPC reads the request of a unary method before it calls the handler.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any

import grpc

from tandem.router.errors import OverloadedError, RequestError
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.grpc import router_trailer, status_code
from tandem.router.frontends.read_slots import ReadSlots
from tandem.rpc.channel import MAX_CALLS

# Memory for messages being read.
MAX_READ_BYTES = 128 * 2**20
# Longer than a message takes on a fast network; stalled clients soon give way.
GRACE_S = 1.0
TIMEOUT_S = 60.0
# Health, which needs no key, and reflection take small messages. gRPC has one size limit per port, so these messages
# are limited by time.
MAX_SMALL_BYTES = 4096
NUM_SMALL_SLOTS = 16
SMALL_GRACE_S = 0.05
SMALL_TIMEOUT_S = 5.0
MAX_SMALL_WAITING = 256


class IntakeInterceptor(grpc.aio.ServerInterceptor):
    def __init__(self, own_service: str, frontend: Frontend, note_key: Callable[[str], None]) -> None:
        """
        Args:
            own_service: the service that takes large messages.
            note_key: called with the peer of each of its calls, whose key is right.
        """
        self._own_prefix = f"/{own_service}/"
        max_bytes = frontend.config.max_body_bytes
        num_slots = max(1, MAX_READ_BYTES // max_bytes)
        slots = ReadSlots(num_slots, grace_s=GRACE_S, timeout_s=TIMEOUT_S, max_waiting=MAX_CALLS)
        self._own = _Reader(slots, max_bytes, frontend.refusals_counted, router_trailer(frontend), note_key)
        small = ReadSlots(
            NUM_SMALL_SLOTS,
            grace_s=SMALL_GRACE_S,
            timeout_s=SMALL_TIMEOUT_S,
            max_waiting=MAX_SMALL_WAITING,
            newest_first=True,
        )
        self._small = _Reader(small, MAX_SMALL_BYTES, nullcontext, router_trailer(frontend), lambda _: None)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        reader = self._own if handler_call_details.method.startswith(self._own_prefix) else self._small
        return _reading(handler, reader)


class _Reader:
    def __init__(
        self,
        slots: ReadSlots,
        max_bytes: int,
        counted: Callable[[], AbstractContextManager[None]],
        trailer: tuple[tuple[str, str], ...],
        note: Callable[[str], None],
    ) -> None:
        self._slots = slots
        self._max_bytes = max_bytes
        self._counted = counted
        self._trailer = trailer
        self._note = note

    async def read(self, context: grpc.aio.ServicerContext) -> Any:
        """Aborts the call if the message is too large or there is no room."""
        peer = context.peer()
        self._note(peer)
        try:
            with self._counted():
                data = await self._slots.read(context.read, peer)
                if data is grpc.aio.EOF or len(data) <= self._max_bytes:
                    return data
                num_bytes = len(data)
                # An aborted call's frames live until the next full garbage collection.
                del data
                raise OverloadedError(f"the message has {num_bytes} bytes, more than {self._max_bytes}")
        except RequestError as error:
            await context.abort(status_code(error), str(error), self._trailer)

    async def read_only_one(self, context: grpc.aio.ServicerContext) -> Any:
        data = await self.read(context)
        if data is grpc.aio.EOF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call ended without a request", self._trailer)
        return data


def _reading(handler: Any, reader: _Reader) -> grpc.RpcMethodHandler:
    parse = handler.request_deserializer

    async def answer(_: Any, context: grpc.aio.ServicerContext) -> Any:
        return await handler.unary_unary(parse(await reader.read_only_one(context)), context)

    async def stream(_: Any, context: grpc.aio.ServicerContext) -> None:
        await _respond(handler.unary_stream(parse(await reader.read_only_one(context)), context), context)

    async def messages(context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        while (data := await reader.read(context)) is not grpc.aio.EOF:
            yield parse(data)

    async def converse(_: Any, context: grpc.aio.ServicerContext) -> None:
        await _respond(handler.stream_stream(messages(context), context), context)

    if handler.unary_unary is not None:
        return grpc.stream_unary_rpc_method_handler(answer, None, handler.response_serializer)
    if handler.unary_stream is not None:
        return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)
    return grpc.stream_stream_rpc_method_handler(converse, None, handler.response_serializer)


async def _respond(responses: Any, context: grpc.aio.ServicerContext) -> None:
    """Sends a handler's responses. A handler that is no iterator sends them itself."""
    if not hasattr(responses, "__aiter__"):
        await responses
        return
    async with aclosing(responses):
        async for response in responses:
            await context.write(response)
