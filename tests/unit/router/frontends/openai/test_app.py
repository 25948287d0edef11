"""The HTTP frontend over a router with scripted workers, without sockets, and its description."""

import asyncio
import json
import socket
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.types import ASGIApp

from router.config import RouterConfig
from router.frontends.base import Frontend
from router.frontends.openai.app import make_app
from router.router import Router
from tandem.messages import Admit, Finished
from tests.fakes.raw_http import read_all
from tests.fakes.router_harness import first_token, run, settle, step_tokens
from tests.fakes.routing import RecordingPolicy
from tests.fakes.scripted_worker import ScriptedWorker
from tests.fakes.tokenizer import ByteTokenizer


@dataclass
class Response:
    status: int = 0
    body: bytes = b""

    def json(self) -> Any:
        return json.loads(self.body)


class HttpHarness:
    """A prefill and a decode worker behind the application."""

    def __init__(self) -> None:
        config = RouterConfig("nowhere", "fake", 400)
        self.policy = RecordingPolicy()
        self.router = Router(config, self.policy)
        self.p = ScriptedWorker(self.router, "p", "prefill")
        self.d = ScriptedWorker(self.router, "d", "decode")
        self.p.link_to("d")
        self._app: ASGIApp = make_app(Frontend(self.router, ByteTokenizer(), config))  # type: ignore[arg-type]

    def post(self, **body: Any) -> "asyncio.Task[Response]":
        return asyncio.create_task(self._post(body))

    async def _post(self, body: dict[str, Any]) -> "Response":
        content = json.dumps({"prompt": "hi", **body}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": headers,
            "state": {},
        }
        messages = iter([{"type": "http.request", "body": content}])
        response = Response()

        async def receive() -> Any:
            for message in messages:
                return message
            # The client stays.
            await asyncio.Future()

        async def send(message: Any) -> None:
            response.status = message.get("status", response.status)
            response.body += message.get("body", b"")

        await self._app(scope, receive, send)
        return response

    async def answer(self, text: bytes) -> None:
        """The workers' answer to the one request that has come: so many tokens."""
        await settle()
        (admit,) = self.d.of(Admit)
        self.p.say(first_token(admit.request_id, 0, 0, text[0]))
        self.d.say(step_tokens(admit.request_id, 0, 1, *text[1:]))
        self.d.say(Finished(admit.request_id, 0, "length", len(text), 0, 1))


@run
async def test_a_whole_answer() -> None:
    h = HttpHarness()
    answer = h.post(max_tokens=5)
    await h.answer(b"hello")
    content = (await answer).json()
    assert content["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "length"}]
    assert (content["usage"]["prompt_tokens"], content["usage"]["completion_tokens"]) == (2, 5)


@run
async def test_a_streamed_answer() -> None:
    h = HttpHarness()
    answer = h.post(max_tokens=5, stream=True)
    await h.answer(b"hello")
    *events, done, rest = (await answer).body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    choices = [json.loads(event.partition("data: ")[2])["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == "hello"
    assert choices[-1]["finish_reason"] == "length"


@run
async def test_what_a_request_says_of_itself_reaches_the_policy() -> None:
    h = HttpHarness()
    answer = h.post(max_tokens=5, priority=-3, cache_namespace="tenant", session_id="talk")
    await h.answer(b"hello")
    await answer
    chosen_for = next(call[2] for call in h.policy.calls if call[0] == "choose")
    assert (chosen_for.priority, chosen_for.cache_namespace, chosen_for.session_id) == (-3, "tenant", "talk")
    assert (chosen_for.prompt_ids, chosen_for.max_new_tokens) == (tuple(b"hi"), 5)


@run
async def test_a_policy_that_fails_is_the_server_s_mistake() -> None:
    h = HttpHarness()
    h.policy.fail_in.add("choose")
    for stream in (False, True):
        response = await h.post(stream=stream)
        assert response.status == 500
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "internal")
        assert error["message"].startswith("the routing policy failed")


@pytest.mark.parametrize("name", ["session_id", "cache_namespace"])
def test_names_have_a_length(name: str) -> None:
    @run
    async def scenario() -> None:
        response = await HttpHarness().post(**{name: "x" * 257})
        assert response.status == 400
        error = response.json()["error"]
        assert (error["message"], error["param"]) == (f"{name} must have at most 256 characters, not 257", name)

    scenario()


def test_the_description_names_the_answers_that_there_are(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=10.0) as connection:
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        description = json.loads(read_all(connection).partition(b"\r\n\r\n")[2])
    for operations in description["paths"].values():
        for operation in operations.values():
            assert {"200", "400", "401", "413", "500", "503"} <= set(operation["responses"])
            assert "422" not in operation["responses"]
    assert "HTTPValidationError" not in description["components"]["schemas"]
