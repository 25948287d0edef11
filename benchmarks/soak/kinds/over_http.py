"""Event streams over raw HTTP: resumed, cancelled and read slowly; messages, background responses, bad requests."""

import random
import time
from dataclasses import replace
from typing import Any

from benchmarks.soak.case import Case
from benchmarks.soak.event_stream import PassingError, RefusedError, call, events
from benchmarks.soak.kinds.base import Clients, Kind

_COMPLETIONS = "/v1/completions"
_POLL_S = 0.25
_BACKGROUND_S = 150.0
_MAX_RESUMES = 60
# Of messages and background responses.
_MAX_TOKENS = 24
_RESUME_AFTER_S = 0.3
_BAD: tuple[tuple[str, bytes], ...] = (
    (_COMPLETIONS, b'{"prompt": "hi", "max_tokens": -1}'),
    (_COMPLETIONS, b'{"prompt": "hi", "temperature": "hot"}'),
    (_COMPLETIONS, b'{"prompt": '),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": 7}]}'),
    ("/v1/chat/completions", b'{"messages": [], "tools": "none"}'),
    ("/v1/embeddings", b'{"input": []}'),
    ("/v1/no/such/path", b"{}"),
)


class Streamed(Kind):
    """A completion that the client follows to its end, over as many connections as it takes."""

    name = "streamed, HTTP"

    def body(self, clients: Clients, number: int) -> dict[str, Any]:
        return {
            "model": clients.model,
            "prompt": self.texts[number % len(self.texts)],
            "stream": True,
            **self.sampling(number),
        }

    def sampling(self, number: int) -> dict[str, Any]:
        return {
            "max_tokens": 16 + 12 * (number % 3),
            "temperature": 0.9 * (number % 2),
            "seed": number,
            "ignore_eos": True,
        }

    def first(self, clients: Clients, number: int) -> Any:
        return self._follow(clients, number)

    def cases(self, number: int, answer: Any, *, is_first: bool) -> list[Case]:
        return [Case(self.texts[number % len(self.texts)], self.sampling(number), answer)]

    def _follow(self, clients: Clients, number: int, break_after: int = 0, pause_s: float = 0.0) -> str:
        text, event_id, reason = "", "", None
        for _ in range(_MAX_RESUMES):
            stream = events(
                clients.http, _COMPLETIONS, self.body(clients, number), last_event_id=event_id, pause_s=pause_s
            )
            try:
                for num_events, (new_id, content) in enumerate(stream, 1):
                    event_id = new_id or event_id
                    for choice in content["choices"]:
                        text += choice["text"]
                        reason = choice["finish_reason"] or reason
                    if num_events == break_after:
                        break
                else:
                    if reason is None:
                        raise ValueError("the stream ended without a reason")
                    return text
            except PassingError:
                time.sleep(_RESUME_AFTER_S)
            except RefusedError as error:
                # 404: no token of it was made. 410: router and worker died together. Both say: begin again.
                if event_id and error.status in (404, 410):
                    raise PassingError(f"HTTP {error.status} when resumed") from error
                raise
            finally:
                stream.close()
            break_after = 0
        raise ValueError(f"the stream did not end in {_MAX_RESUMES} connections")


class ResumedEvents(Streamed):
    name = "resumed, HTTP"

    def again(self, clients: Clients, number: int, rng: random.Random) -> Any:
        return self._follow(clients, number, break_after=rng.randint(1, 12))


class SlowReader(Streamed):
    name = "slow reader, HTTP"

    def again(self, clients: Clients, number: int, rng: random.Random) -> Any:
        return self._follow(clients, number, pause_s=rng.uniform(0.1, 0.4))


class CancelledEvents(Streamed):
    name = "cancelled, HTTP"

    def again(self, clients: Clients, number: int, rng: random.Random) -> Any:
        enough = rng.randint(1, 8)
        text = ""
        stream = events(clients.http, _COMPLETIONS, self.body(clients, number))
        for num_events, (_, content) in enumerate(stream, 1):
            text += "".join(choice["text"] for choice in content["choices"])
            if num_events >= enough:
                break
        stream.close()
        return text

    def is_right(self, first: Any, again: Any) -> bool:
        return bool(first.startswith(again))

    def cases(self, number: int, answer: Any, *, is_first: bool) -> list[Case]:
        (case,) = super().cases(number, answer, is_first=is_first)
        return [replace(case, is_whole=is_first)]


class Messages(Kind):
    """Anthropic's Messages, streamed."""

    name = "messages, HTTP"

    def first(self, clients: Clients, number: int) -> Any:
        body = {
            "model": clients.model,
            "max_tokens": _MAX_TOKENS,
            "messages": [{"role": "user", "content": self.texts[number % len(self.texts)]}],
            "temperature": 0,
            "stream": True,
        }
        stopped = False
        text = ""
        for _, content in events(clients.http, "/v1/messages", body):
            text += content.get("delta", {}).get("text", "")
            if content["type"] == "message_stop":
                stopped = True
                break
        if not stopped:
            raise PassingError("the stream broke")
        return text

    def cases(self, number: int, answer: Any, *, is_first: bool) -> list[Case]:
        return [_greedy_chat(self.texts[number % len(self.texts)], answer)]


class Background(Kind):
    """A response in the background, polled to its end and removed."""

    name = "background response, HTTP"

    def first(self, clients: Clients, number: int) -> Any:
        response = self._begin(clients, number)
        path = f"/v1/responses/{response['id']}"
        deadline = time.monotonic() + _BACKGROUND_S
        while response["status"] in ("queued", "in_progress"):
            if time.monotonic() > deadline:
                raise ValueError(f"still {response['status']} after {_BACKGROUND_S:.0f} s")
            time.sleep(_POLL_S)
            response = _get(clients, path, response)
        _remove(clients, path)
        if response["status"] not in ("completed", "incomplete"):
            raise ValueError(f"status {response['status']}: {response.get('error')}")
        return "".join(part["text"] for item in response["output"] for part in item["content"])

    def _begin(self, clients: Clients, number: int) -> dict[str, Any]:
        body = {
            "model": clients.model,
            "input": self.texts[number % len(self.texts)],
            "max_output_tokens": _MAX_TOKENS,
            "temperature": 0,
            "background": True,
        }
        return dict(call(clients.http, "POST", "/v1/responses", body))

    def cases(self, number: int, answer: Any, *, is_first: bool) -> list[Case]:
        return [_greedy_chat(self.texts[number % len(self.texts)], answer)]


class CancelledBackground(Background):
    name = "cancelled in the background, HTTP"

    def again(self, clients: Clients, number: int, rng: random.Random) -> Any:
        response = self._begin(clients, number)
        path = f"/v1/responses/{response['id']}"
        time.sleep(rng.uniform(0.0, 1.0))
        response = _get(clients, path, response)
        if response["status"] in ("queued", "in_progress"):
            try:
                response = call(clients.http, "POST", f"{path}/cancel")
            except RefusedError as error:
                raise _lost(error) from error
        _remove(clients, path)
        return "".join(part["text"] for item in response.get("output", []) for part in item["content"])

    def is_right(self, first: Any, again: Any) -> bool:
        return bool(first.startswith(again))

    def cases(self, number: int, answer: Any, *, is_first: bool) -> list[Case]:
        (case,) = super().cases(number, answer, is_first=is_first)
        return [replace(case, is_whole=is_first)]


class Bad(Kind):
    """Requests to refuse."""

    name = "bad request, HTTP"

    def first(self, clients: Clients, number: int) -> Any:
        path, body = _BAD[number % len(_BAD)]
        try:
            call(clients.http, "POST", path, body)
        except RefusedError as error:
            if error.status not in (400, 404) or "\n" in error.message:
                raise
            return error.status, error.message
        raise ValueError(f"{body!r} was accepted")


def _greedy_chat(text: str, answer: str) -> Case:
    return Case(text, {"max_tokens": _MAX_TOKENS}, answer, is_chat=True)


def _get(clients: Clients, path: str, last: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(call(clients.http, "GET", path))
    except PassingError:
        # Its router is away.
        return last
    except RefusedError as error:
        raise _lost(error) from error


def _remove(clients: Clients, path: str) -> None:
    try:
        call(clients.http, "DELETE", path)
    except RefusedError as error:
        raise _lost(error) from error


def _lost(error: RefusedError) -> Exception:
    """A restarted router has forgotten its responses."""
    return PassingError("404: response lost with its router") if error.status == 404 else error
