"""An asyncio loop for a process that sends many messages over grpc.aio.

grpc.aio has a thread of its own, the poller, that learns of each event, such as a message that has gone out, and writes
a byte to a socket for it, at which the loop wakes and handles all events that have come. Left alone, the two run by
turns: the poller is woken for each message that the loop sends and takes the processor from it, and the loop wakes for
each byte, though the first one was word enough of all events. That is two switches between threads and two system calls
for each message.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import uvloop

# More bytes than events ever wait.
MAX_WAITING_BYTES = 65536


class GrpcLoop(uvloop.Loop):
    """uvloop's, on which the events of many messages are handled together."""

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        if isinstance(fd, socket.socket) and _is_grpcs(callback):
            callback = partial(_handle_together, fd, callback)
            _calm_poller()
        super().add_reader(fd, callback, *args)


def _is_grpcs(callback: Callable[..., Any]) -> bool:
    handler = callback.func if isinstance(callback, partial) else None
    return type(getattr(handler, "__self__", None)).__name__ == "PollerCompletionQueue"


def _handle_together(events: socket.socket, handle: Callable[..., Any]) -> None:
    # An event waits before its byte is written, so none is missed whose byte is taken here. gRPC takes one itself, and
    # does not mind that there is none left.
    num_bytes = 1
    with contextlib.suppress(BlockingIOError):
        num_bytes = len(events.recv(MAX_WAITING_BYTES))
    for _ in range(num_bytes):
        try:
            handle()
            return
        except RuntimeError:
            # gRPC has one queue for all loops of a process. It has taken out an event of a loop that is closed by now,
            # for which nobody waits, and has left those behind it, whose bytes are taken.
            continue


def _calm_poller() -> None:
    """Has the poller run beside the loop, where a processor is free, or after it, but not in its place: a thread of
    this class gets its share as before, and takes no other's processor when it is woken."""
    for thread in threading.enumerate():
        # Python names a thread by what it runs.
        if "_poll_wrapper" in thread.name and thread.native_id is not None:
            # A sandbox may forbid it.
            with contextlib.suppress(OSError):
                os.sched_setscheduler(thread.native_id, os.SCHED_BATCH, os.sched_param(0))
