"""Lines for each request's beginning and end, for the terminal of the cluster's starter.

They travel over a socket, because an actor's standard error stays in Ray's files. With a terminal on another host, the
supervisor fetches them instead. Sending never waits: undeliverable lines are lost, and counted.
"""

import contextlib
import math
import socket
import time
from collections import deque
from typing import Protocol

from tandem.lifecycle import TOTALS
from tandem.router.requests.tracker import RequestReport, RequestTracker

MAX_LINE_BYTES = 2048
# One megabyte at most.
MAX_KEPT_LINES = 512


class LineSink(Protocol):
    def send(self, line: bytes) -> bool:
        """Returns whether the line is on its way; never waits."""
        ...

    def close(self) -> None: ...


class SocketLines:
    def __init__(self, name: str) -> None:
        self._address = f"\0{name}"
        self._socket: socket.socket | None = None

    def send(self, line: bytes) -> bool:
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
                self._socket.connect(self._address)
            self._socket.send(line)
        except BlockingIOError:
            # The terminal is slower than the requests.
            return False
        except OSError:
            with contextlib.suppress(OSError):
                self.close()
            return False
        return True

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class KeptLines:
    """Keeps lines until another thread takes them."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque()

    def send(self, line: bytes) -> bool:
        if len(self._lines) >= MAX_KEPT_LINES:
            return False
        self._lines.append(line)
        return True

    def take(self, num_bytes: float = math.inf) -> list[str]:
        """Returns new lines, made printable.

        Args:
            num_bytes: size at which to stop; the others stay for the next call.
        """
        lines: list[str] = []
        # Two threads may take lines at once.
        with contextlib.suppress(IndexError):
            for _ in range(len(self._lines)):
                if num_bytes <= 0:
                    break
                lines.append(shown(self._lines.popleft()))
                num_bytes -= len(lines[-1].encode())
        return lines

    def close(self) -> None:
        """Kept lines can still be taken."""


class RequestLines:
    """Prompts, outputs and keys are in no line."""

    def __init__(self, router_id: str, sink: LineSink) -> None:
        self._router_id = router_id
        self._sink = sink
        self._num_lost = 0

    def begun(self, tracker: RequestTracker) -> None:
        sampling = tracker.sampling
        asked = f"max_tokens={sampling.max_tokens} temperature={sampling.temperature:g}"
        asked = "embedding" if tracker.embeds else asked
        self._send(f"> {_name(tracker)} prompt_tokens={len(tracker.prompt_ids)} {asked}")

    def ended(self, report: RequestReport) -> None:
        took = "".join(f" {t.name}_ms={t.duration_ms:.0f}" for t in report.timings if t.name in TOTALS)
        loaded = "".join(f"{name}={count} " for name, count in report.loaded.counts().items())
        failure = report.tracker.failure
        self._send(
            f"< {_name(report.tracker)} {report.outcome} prompt_tokens={report.num_prompt_tokens} "
            f"cached_tokens={report.num_cached_tokens} {loaded}output_tokens={report.num_output_tokens}{took}"
            f"{f': {failure}' if failure else ''}"
        )

    def refused(self, request_id: str, outcome: str, error: str) -> None:
        self._send(f"! {request_id or '-'} {outcome}: {error}")

    def close(self) -> None:
        self._sink.close()

    def _send(self, text: str) -> None:
        now = time.time()
        lost = f" ({self._num_lost} lines lost)" if self._num_lost else ""
        moment = f"{time.strftime('%H:%M:%S', time.localtime(now))}.{int(now * 1000) % 1000:03d}"
        line = f"{moment} {self._router_id}{lost} {text}".encode(errors="replace")[:MAX_LINE_BYTES]
        self._num_lost = 0 if self._sink.send(line) else self._num_lost + 1


def shown(line: bytes) -> str:
    """Replaces control characters, which clients may have sent to the terminal."""
    text = line.decode(errors="replace")
    return "".join(character if character.isprintable() else "?" for character in text)


def _name(tracker: RequestTracker) -> str:
    return (
        f"{tracker.spec.client_request_id} {tracker.request_id}"
        if tracker.spec.client_request_id
        else tracker.request_id
    )
