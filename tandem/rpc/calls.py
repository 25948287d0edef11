"""The reading side of a gRPC call, for the end that dialed."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc


async def read_first(call: grpc.aio.StreamStreamCall, timeout_s: float) -> Any:
    """Returns the first message of a call, which the other end sends at once.

    Raises:
        TimeoutError: none came in time.
        ConnectionError: the other end ended the call instead; the message says why.
        grpc.aio.AioRpcError: the call failed.
    """
    async with asyncio.timeout(timeout_s):
        first = await call.read()
    if first is grpc.aio.EOF:
        await call.code()
        raise ConnectionError(await call.details())
    return first


@contextmanager
def call_errors() -> Iterator[None]:
    """Raises ConnectionError where gRPC cancels a call: it does so if it could not write a message. Only a cancellation
    of the task itself ends the task."""
    try:
        yield
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise ConnectionError("the call was cancelled") from None


def is_cancelled() -> bool:
    """Returns whether the current task was cancelled, as opposed to one of its calls."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def reason_of(error: Exception) -> str:
    """Returns why a call ended: its details if gRPC has any, else the error's text."""
    return str(error.details() if isinstance(error, grpc.aio.AioRpcError) else error)
