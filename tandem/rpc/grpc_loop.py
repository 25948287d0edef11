"""An asyncio loop for processes that send many messages over grpc.aio.

grpc.aio's poller thread writes a byte to a socket for each event, such as a sent message. The byte wakes the loop,
which handles all waiting events. By default, each sent message wakes the poller, which preempts the loop, and each byte
wakes
the loop again: two thread switches and two system calls per message.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import uvloop

# More than the events that ever wait.
MAX_WAITING_BYTES = 65536


class GrpcLoop(uvloop.Loop):
    """A uvloop that handles the events of many messages together."""

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        if isinstance(fd, socket.socket) and _is_grpcs(callback):
            callback = partial(_handle_together, fd, callback)
            _calm_poller()
        super().add_reader(fd, callback, *args)


def _is_grpcs(callback: Callable[..., Any]) -> bool:
    handler = callback.func if isinstance(callback, partial) else None
    return type(getattr(handler, "__self__", None)).__name__ == "PollerCompletionQueue"


def _handle_together(events: socket.socket, handle: Callable[..., Any]) -> None:
    # Events are queued before their bytes are written, so taking bytes here loses none. gRPC reads one byte itself and
    # tolerates an empty socket.
    num_bytes = 1
    with contextlib.suppress(BlockingIOError):
        num_bytes = len(events.recv(MAX_WAITING_BYTES))
    for _ in range(num_bytes):
        try:
            handle()
            return
        except RuntimeError:
            # gRPC has one queue for all loops of a process. It removed an event of a closed loop and stopped, but the
            # bytes of the events behind it are gone.
            continue


def _calm_poller() -> None:
    """Keep the poller from preempting the loop; SCHED_BATCH keeps its share of CPU time."""
    for thread in threading.enumerate():
        # Python names a thread after its target.
        if "_poll_wrapper" in thread.name and thread.native_id is not None:
            # A sandbox may forbid it.
            with contextlib.suppress(OSError):
                os.sched_setscheduler(thread.native_id, os.SCHED_BATCH, os.sched_param(0))
