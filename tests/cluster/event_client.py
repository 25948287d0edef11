"""HTTP client that resumes broken event streams, like EventSource."""

import http.client
import json
import threading
import time
from collections.abc import Sequence
from typing import Any

from tandem.router.frontends.openai.streaming import KEEPALIVE_S

RETRY_S = 0.1
# Longest silence, keepalive comments included.
SILENCE_TIMEOUT_S = 1.5 * KEEPALIVE_S
STREAM_TIMEOUT_S = 60.0
# Retried.
PASSING = (429, 503)
PATH = "/v1/completions"


class RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class EventClient:
    """One stream, read by its own thread.

    Attributes:
        num_breaks: number of reconnections.
    """

    def __init__(self, addresses: Sequence[str], body: dict[str, Any], *, last_event_id: str = "") -> None:
        """Args: last_event_id: of an earlier stream to resume."""
        self.text = ""
        self.finish_reasons: list[str] = []
        self.usages: list[dict[str, Any]] = []
        self.answer_ids: set[str] = set()
        self.num_breaks = 0
        self._addresses = addresses
        self._last_event_id = last_event_id
        self._body = json.dumps({"stream": True, **body})
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait_characters(self, num_characters: int) -> bool:
        """Return whether they arrived before the stream ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or len(self.text) >= num_characters, STREAM_TIMEOUT_S)
            return not self._is_over

    def finish(self) -> str:
        self._thread.join(STREAM_TIMEOUT_S)
        assert not self._thread.is_alive(), "the stream hangs"
        if self._error is not None:
            raise self._error
        return self.text

    def _run(self) -> None:
        deadline = time.monotonic() + STREAM_TIMEOUT_S
        number = 0
        try:
            while not self._read(self._addresses[number % len(self._addresses)]):
                assert time.monotonic() < deadline, "no router answers"
                self.num_breaks += 1
                number += 1
                time.sleep(RETRY_S)
        except Exception as error:
            self._error = error
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _read(self, address: str) -> bool:
        """Return whether the stream has ended."""
        connection = http.client.HTTPConnection(address, timeout=SILENCE_TIMEOUT_S)
        headers = {"content-type": "application/json"}
        if self._last_event_id:
            headers["last-event-id"] = self._last_event_id
        try:
            connection.request("POST", PATH, self._body, headers)
            answer = connection.getresponse()
            if answer.status in PASSING:
                return False
            if answer.status != 200:
                raise RefusedError(answer.status, json.load(answer)["error"]["message"])
            event_id = ""
            for line in answer:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name == "id":
                    event_id = value
                elif name == "data" and value == "[DONE]":
                    return True
                elif name == "data" and not self._take(json.loads(value), event_id):
                    return False
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        return False

    def _take(self, content: dict[str, Any], event_id: str) -> bool:
        """Return whether the stream continues after this event."""
        if "error" in content:
            return False
        with self._changed:
            self._last_event_id = event_id
            self.answer_ids.add(content["id"])
            for choice in content["choices"]:
                self.text += choice["text"]
                self.finish_reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            self.usages += [content["usage"]] if content.get("usage") else []
            self._changed.notify_all()
        return True
