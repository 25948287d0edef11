"""Event streams over raw HTTP: broken off, resumed and read slowly at will."""

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any

# Longer than the 10 s after which a live router sends a comment.
SILENCE_S = 20.0
# Of a slow reader's socket: small, so that the router feels it.
_SMALL_BUFFER_BYTES = 4096
_PASSING = (429, 503)
_PASSING_CODES = ("overloaded", "unavailable")


class PassingError(Exception):
    """The router has left, or refuses for now: the same request may be sent again. Its text is the reason."""


class RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.message = message


def call(
    address: str, method: str, path: str, body: Mapping[str, Any] | bytes | None = None, timeout_s: float = 60.0
) -> Any:
    """Return the decoded answer of a request without a stream. Raises PassingError, RefusedError."""
    with _open(address, method, path, body, {}, timeout_s) as answer:
        return json.load(answer)


def events(
    address: str, path: str, body: Mapping[str, Any], *, last_event_id: str = "", pause_s: float = 0.0
) -> Generator[tuple[str, dict[str, Any]]]:
    """Yield (event id, content) of a stream; closing the iterator breaks the connection.

    Args:
        pause_s: between events, read from a small buffer.

    Raises PassingError, also if the stream breaks, and RefusedError.
    """
    headers = {"last-event-id": last_event_id} if last_event_id else {}
    with _open(address, "POST", path, body, headers, SILENCE_S, is_slow=pause_s > 0) as answer:
        event_id = ""
        for line in answer:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "id":
                event_id = value
            elif name == "data" and value == "[DONE]":
                return
            elif name == "data":
                content = json.loads(value)
                if "error" in content:
                    raise _error_of(content["error"])
                yield event_id, content
                time.sleep(pause_s)
        raise PassingError("the stream broke")


@contextlib.contextmanager
def _open(
    address: str,
    method: str,
    path: str,
    body: Mapping[str, Any] | bytes | None,
    headers: Mapping[str, str],
    timeout_s: float,
    *,
    is_slow: bool = False,
) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        if is_slow:
            connection.sock = _slow_socket(address, timeout_s)
        data = json.dumps(body).encode() if isinstance(body, Mapping) else body
        connection.request(method, path, data, {"content-type": "application/json", **headers})
        answer = connection.getresponse()
        if answer.status >= 400:
            message = json.load(answer)["error"]["message"]
            if answer.status in _PASSING:
                raise PassingError(f"HTTP {answer.status}: {message}")
            raise RefusedError(answer.status, message)
        yield answer
    except TimeoutError as error:
        raise RefusedError(0, f"no answer within {timeout_s:.0f} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise PassingError(f"connection: {type(error).__name__}") from error
    finally:
        connection.close()


def _error_of(error: Mapping[str, Any]) -> Exception:
    message = f"error event {error['code']}: {error['message']}"
    return PassingError(message) if error["code"] in _PASSING_CODES else RefusedError(0, message)


def _slow_socket(address: str, timeout_s: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER_BYTES)
    slow.settimeout(timeout_s)
    slow.connect((host, int(port)))
    return slow
