"""Calls of clients at the routers of a simulated cluster: through the real gRPC service, without gRPC."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import grpc

from router.frontends.grpc import InferenceService
from tandem.v1 import inference_pb2 as pb


class CallError(Exception):
    """How a call ends that does not end well: as gRPC tells a client of it."""

    def __init__(self, code: grpc.StatusCode, details: str, trailers: Any = ()) -> None:
        super().__init__(details)
        self._code, self._trailers = code, trailers

    def code(self) -> grpc.StatusCode:
        return self._code

    def trailing_metadata(self) -> Any:
        return self._trailers


class _Context:
    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def abort(self, code: grpc.StatusCode, details: str, trailers: Any = ()) -> None:
        raise CallError(code, details, trailers)


class _Loop:
    """What asyncio asks of a loop where a coroutine waits for a future. Whoever runs the coroutine looks at that."""

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)  # type: ignore[arg-type]

    def get_debug(self) -> bool:
        return False


class SimCall:
    """One Generate call, whose handler runs when the simulation says so."""

    def __init__(self, service: InferenceService, request: pb.GenerateRequest) -> None:
        self._responses: Any = service.Generate(request, _Context())  # type: ignore[arg-type]
        self._next: Coroutine[Any, Any, pb.GenerateResponse] | None = None
        self._waits_for: asyncio.Future[Any] | None = None
        self._loop: Any = _Loop()

    def poll(self) -> pb.GenerateResponse | None:
        """The next response, if there is one now.

        Raises:
            StopAsyncIteration: the last one was given.
            CallError: the router has ended the call.
        """
        if self._waits_for is not None and not self._waits_for.done():
            return None
        if self._next is None:
            self._next = self._responses.__anext__()
        try:
            self._waits_for = self._run(self._next.send, None)
        except StopIteration as result:
            self._next = self._waits_for = None
            return result.value
        return None

    def cancel(self) -> None:
        """Its client is gone, as the router sees it."""
        if self._next is not None:
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                self._run(self._next.throw, asyncio.CancelledError())
        else:
            with contextlib.suppress(StopIteration):
                self._run(self._responses.aclose().send, None)

    def _run(self, step: Any, value: Any) -> Any:
        asyncio._set_running_loop(self._loop)
        try:
            return step(value)
        finally:
            asyncio._set_running_loop(None)
