"""Closing of connections in bounded time, after the peer could read its last answer."""

import asyncio
from collections.abc import Callable
from typing import Any

# A peer that is still sending would miss its answer if the connection closed at once.
LINGER_S = 5.0
# For all connections of a port together. Copying so much takes 2 % of a core.
MAX_DISCARDED_BYTES_PER_S = 64 * 2**20
# Limit on the time in which a peer takes no part of its answer.
UNREAD_TIMEOUT_S = 30.0
# Limit on the wait for the peer's end of a TLS connection.
GOODBYE_TIMEOUT_S = 2.0
CHECK_INTERVAL_S = 1.0


class DiscardBudget:
    """Limits the bytes that closing connections read."""

    def __init__(self, max_bytes_per_s: int, now: Callable[[], float]) -> None:
        self._max_bytes_per_s = max_bytes_per_s
        self._now = now
        self._num_left = float(max_bytes_per_s)
        self._counted_at = now()

    def take(self, num_bytes: int) -> float:
        """Counts bytes that were read. Returns the time until more may be, in seconds."""
        now = self._now()
        earned = (now - self._counted_at) * self._max_bytes_per_s
        self._num_left = min(self._num_left + earned, self._max_bytes_per_s) - num_bytes
        self._counted_at = now
        return max(0.0, -self._num_left / self._max_bytes_per_s)


class ClosingTransport:
    """Wraps a connection's transport.

    Attributes: is_peer_sending: set by the protocol while a request is unfinished; `close` then lingers.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, budget: DiscardBudget) -> None:
        self._transport = transport
        self._loop = loop
        self._budget = budget
        self._timer: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._is_closing = False
        self._is_lingering = False
        self._num_unsent = 0
        self._progress_at = 0.0
        self.is_peer_sending = False
        # Each token of a stream is one write.
        self.write: Callable[[bytes], None] = transport.write
        self.get_extra_info = transport.get_extra_info
        self.get_write_buffer_size = transport.get_write_buffer_size
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        if not self.is_peer_sending or self._transport.is_closing():
            self._finish()
            return
        self._is_lingering = True
        self.write = _ignore
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._transport.resume_reading()
        self._timer = self._loop.call_later(LINGER_S, self._end_linger)

    def close_at_once(self) -> None:
        """Closes without reading on. Written bytes are still sent."""
        if not self._is_closing:
            self._is_closing = True
            self._finish()

    def abort(self) -> None:
        self._transport.abort()

    def discard(self, num_bytes: int) -> None:
        """Counts bytes that came while closing, and pauses if all connections together have read too many."""
        if self._is_lingering and (wait_s := self._budget.take(num_bytes)):
            self._transport.pause_reading()
            self._pause = self._loop.call_later(wait_s, self._transport.resume_reading)

    def lost(self) -> None:
        """The protocol's connection_lost was called."""
        self._is_closing = True
        self._is_lingering = False
        self._cancel_timers()

    def _end_linger(self) -> None:
        if self._transport.get_write_buffer_size():
            self._finish()
        else:
            # The peer has the answer. TLS would read on without a limit until the peer's goodbye.
            self._is_lingering = False
            self._cancel_timers()
            self._transport.abort()

    def _finish(self) -> None:
        self._is_lingering = False
        self._cancel_timers()
        self._transport.close()
        self._num_unsent = self._transport.get_write_buffer_size()
        self._progress_at = self._loop.time()
        self._check_later()

    def _check(self) -> None:
        num_unsent, now = self._transport.get_write_buffer_size(), self._loop.time()
        if num_unsent < self._num_unsent:
            self._num_unsent, self._progress_at = num_unsent, now
        if now - self._progress_at >= (UNREAD_TIMEOUT_S if num_unsent else GOODBYE_TIMEOUT_S):
            self._transport.abort()
            return
        self._check_later()

    def _check_later(self) -> None:
        self._timer = self._loop.call_later(CHECK_INTERVAL_S, self._check)

    def _cancel_timers(self) -> None:
        for timer in (self._timer, self._pause):
            if timer is not None:
                timer.cancel()
        self._timer = self._pause = None


def _ignore(_: Any) -> None:
    pass
