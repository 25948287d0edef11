"""Client calls to a simulated cluster's routers, through the real gRPC service but without gRPC."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import grpc

from tandem.router.frontends.grpc import InferenceService
from tandem.v1 import inference_pb2 as pb


class CallError(Exception):
    """A failed call, as gRPC reports it to a client."""

    def __init__(self, code: grpc.StatusCode, details: str, trailers: Any = ()) -> None:
        super().__init__(details)
        self._code, self._trailers = code, trailers

    def code(self) -> grpc.StatusCode:
        return self._code

    def trailing_metadata(self) -> Any:
        return self._trailers


class _Loop:
    """The loop methods that asyncio needs to wait for futures and schedule callbacks."""

    def __init__(self) -> None:
        self._soon: deque[Callable[[], object]] = deque()

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)  # type: ignore[arg-type]

    def get_debug(self) -> bool:
        return False

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> None:
        self._soon.append(partial(callback, *args))

    @property
    def is_idle(self) -> bool:
        return not self._soon

    def run_ready(self) -> None:
        while self._soon:
            self._soon.popleft()()


class _Context:
    """The context of one call. Attributes: written: responses not yet taken, each with its waiting write."""

    def __init__(self, loop: _Loop) -> None:
        self.written: deque[tuple[pb.GenerateResponse, asyncio.Future[None]]] = deque()
        self._loop = loop

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        pass

    async def write(self, response: pb.GenerateResponse) -> None:
        self.written.append((response, self._loop.create_future()))
        await self.written[-1][1]

    async def abort(self, code: grpc.StatusCode, details: str, trailers: Any = ()) -> None:
        raise CallError(code, details, trailers)


class SimCall:
    """A Generate call whose handler runs at the simulation's command."""

    def __init__(self, service: InferenceService, request: pb.GenerateRequest) -> None:
        self._loop = _Loop()
        self._context = _Context(self._loop)
        self._handle = partial(service.Generate, request, self._context)
        # Created on first use: a router may die before it looks at the call.
        self._handler: Coroutine[Any, Any, None] | None = None
        self._waits_for: asyncio.Future[Any] | None = None
        self._end: BaseException | None = None

    def poll(self) -> pb.GenerateResponse | None:
        """Return the next response, or None if there is none now.

        Raises:
            StopAsyncIteration: the response before was the last.
            CallError: the router has ended the call.
        """
        self._go_on()
        if self._context.written:
            response, is_taken = self._context.written.popleft()
            is_taken.set_result(None)
            return response
        if self._end is not None:
            raise self._end
        return None

    def cancel(self) -> None:
        if self._handler is not None and self._end is None:
            with contextlib.suppress(asyncio.CancelledError, StopIteration):
                self._run(self._handler.throw, asyncio.CancelledError())

    def _go_on(self) -> None:
        if self._end is not None or (self._waits_for is not None and not self._waits_for.done() and self._loop.is_idle):
            return
        if self._handler is None:
            self._handler = self._handle()
        self._run(self._loop.run_ready)
        while self._end is None and (self._waits_for is None or self._waits_for.done()):
            try:
                self._waits_for = self._run(self._handler.send, None)
            except StopIteration:
                self._end = StopAsyncIteration()
            except CallError as error:
                self._end = error
            self._run(self._loop.run_ready)

    def _run(self, step: Any, *args: Any) -> Any:
        asyncio._set_running_loop(self._loop)  # type: ignore[arg-type]
        try:
            return step(*args)
        finally:
            asyncio._set_running_loop(None)
