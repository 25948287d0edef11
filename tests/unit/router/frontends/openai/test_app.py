"""The HTTP frontend over a router with scripted workers, without sockets, and its description."""

import asyncio
import json
import logging
import socket
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.types import ASGIApp

from tandem.messages import PROTOCOL_VERSION, Admit, Finished, StoreJoin
from tandem.router.config import RouterAddresses, RouterConfig
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.openai.app import make_app
from tandem.router.router import Router
from tandem.router.text.generation_config import SamplingDefaults
from tests.fakes.raw_http import read_all
from tests.fakes.router_harness import first_token, run, settle, step_tokens
from tests.fakes.routing import RecordingPolicy
from tests.fakes.scripted_worker import ScriptedWorker
from tests.fakes.tokenizer import ByteTokenizer


@dataclass
class Response:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def chunks(self) -> list[Any]:
        """Returns a stream's chunks."""
        *events, done, _ = self.body.decode().split("\n\n")
        assert done == "data: [DONE]"
        return [json.loads(event.partition("data: ")[2]) for event in events]

    def json(self) -> Any:
        return json.loads(self.body)


class ChatTokenizer(ByteTokenizer):
    def render_chat(self, messages: Any) -> str:
        return "".join(message["content"] for message in messages)


class HttpHarness:
    """A prefill and a decode worker behind the application."""

    def __init__(self, defaults: SamplingDefaults | None = None, **options: Any) -> None:
        config = RouterConfig("nowhere", "fake", 400, **options)
        self.policy = RecordingPolicy()
        self.router = Router(config, self.policy)
        self.p = ScriptedWorker(self.router, "p", "prefill")
        self.d = ScriptedWorker(self.router, "d", "decode")
        self.p.link_to("d")
        self._app: ASGIApp = make_app(Frontend(self.router, ChatTokenizer(), config, defaults))  # type: ignore[arg-type]

    def post(self, headers: dict[str, str] | None = None, **body: Any) -> "asyncio.Task[Response]":
        return asyncio.create_task(self._post(headers or {}, body))

    async def _post(self, more_headers: dict[str, str], body: dict[str, Any]) -> "Response":
        if "messages" not in body:
            body = {"prompt": "hi", **body}
        content = json.dumps(body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
        headers += [(name.encode(), value.encode()) for name, value in more_headers.items()]
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return await self._ask("POST", path, headers, content)

    async def get(self, path: str, host: str) -> "Response":
        return await self._ask("GET", path, [(b"host", host.encode())], b"")

    async def _ask(self, method: str, path: str, headers: list[tuple[bytes, bytes]], content: bytes) -> "Response":
        scope = {
            "type": "http",
            "method": method,
            "scheme": "http",
            "path": path,
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
            response.headers |= {name.decode(): value.decode() for name, value in message.get("headers", ())}
            response.body += message.get("body", b"")

        await self._app(scope, receive, send)
        return response

    async def answer(self, text: bytes) -> None:
        """Has the workers answer the one request with these bytes as tokens."""
        await settle()
        (admit,) = self.d.of(Admit)
        self.p.say(first_token(admit.request_id, 0, 0, text[0]))
        self.d.say(step_tokens(admit.request_id, 0, 1, *text[1:]))
        self.d.say(Finished(admit.request_id, 0, "length", len(text), 0, 1))


@run
async def test_prometheus_finds_all_routers_where_they_are() -> None:
    async def found(*own: str) -> set[str]:
        routers = {f"router-{number}": RouterAddresses("", address, "") for number, address in enumerate(own)}
        targets = (await HttpHarness(routers=routers).get("/sd", "a.test:8000")).json()
        return {target["targets"][0] for target in targets if target["labels"]["process"] in routers}

    assert await found("0.0.0.0:8001", "0.0.0.0:8002") == {"a.test:8001", "a.test:8002"}
    # Two hosts.
    assert await found("10.0.0.1:8001", "10.0.0.2:8001") == {"10.0.0.1:8001", "10.0.0.2:8001"}


@run
async def test_prometheus_finds_page_stores_at_their_ports_or_through_the_router() -> None:
    h = HttpHarness()
    for number, address in enumerate(("127.0.0.1:77", "")):
        join = StoreJoin(PROTOCOL_VERSION, f"store-{number}", "epoch", f"host {number}", metrics_address=address)
        h.router.stores.connect(join, lambda messages: None, lambda reason: None)
    targets = {target["labels"]["process"]: target for target in (await h.get("/sd", "a.test:8000")).json()}
    assert targets["store-0"]["targets"] == ["127.0.0.1:77"]
    assert targets["store-1"]["targets"] == ["a.test:8000"]
    assert targets["store-1"]["labels"]["__metrics_path__"] == "/metrics/store-1"
    assert (await h.get("/metrics/store-2", "a.test:8000")).status == 404


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


CHAT = [{"role": "user", "content": "hi"}]


@run
async def test_an_answer_has_the_id_of_its_request() -> None:
    for headers, own in (({"x-request-id": "mine"}, True), ({}, False)):
        for name, body in (("cmpl", {}), ("chatcmpl", {"messages": CHAT}), ("chatcmpl", {"messages": CHAT, "n": 1})):
            for stream in (True, False):
                h = HttpHarness()
                answer = h.post(headers, max_tokens=5, stream=stream, **body)
                await h.answer(b"hello")
                response = await answer
                request_id = response.headers["x-request-id"]
                assert (request_id == "mine") == own
                ids = {chunk["id"] for chunk in response.chunks} if stream else {response.json()["id"]}
                assert ids == {f"{name}-{request_id}"}


@run
async def test_a_log_line_has_both_names_of_a_request() -> None:
    h = HttpHarness()
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record)  # type: ignore[method-assign]
    logger = logging.getLogger("tandem.router.requests")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        answer = h.post({"x-request-id": "served"}, max_tokens=5)
        await h.answer(b"hello")
        await answer
        await h.post({"x-request-id": "refused"}, max_tokens=1000)
        await h.post({"x-request-id": "malformed"}, max_tokens="x")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    lines = [json.loads(record.getMessage()) for record in records]
    assert [(line["client_request_id"], line["outcome"]) for line in lines] == [
        ("served", "length"),
        ("refused", "invalid"),
        ("malformed", "invalid"),
    ]
    assert h.d.of(Admit)[0].request_id == lines[0]["request_id"]


@run
async def test_usage_can_be_had_with_every_event() -> None:
    for options, per_event, at_the_end in (
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({"include_usage": True}, False, True),
        ({"continuous_usage_stats": True}, False, False),
    ):
        h = HttpHarness()
        answer = h.post(max_tokens=5, stream=True, stream_options=options)
        await h.answer(b"hello")
        chunks = (await answer).chunks
        assert (not chunks[-1]["choices"]) == at_the_end
        with_choices = [chunk for chunk in chunks if chunk["choices"]]
        counts = [chunk["usage"]["completion_tokens"] for chunk in with_choices if chunk.get("usage")]
        if per_event:
            assert counts == sorted(counts) and len(counts) == len(with_choices) and counts[-1] == 5
            assert all(chunk["usage"]["prompt_tokens"] == 2 for chunk in with_choices)
        else:
            assert counts == []


@run
async def test_obfuscated_events_of_short_texts_have_one_length() -> None:
    h = HttpHarness()
    answer = h.post(max_tokens=12, messages=CHAT, stream=True, stream_options={"include_obfuscation": True})
    await h.answer(b'a"\n hello xx')
    response = await answer
    lengths = {len(line) - len("data: ") for line in response.body.decode().split("\n") if '"choices"' in line}
    assert all(length % 64 == 0 for length in lengths)
    assert all(chunk["obfuscation"] is not None for chunk in response.chunks)
    noise = [chunk["obfuscation"] for chunk in response.chunks if len(chunk["obfuscation"]) > 8]
    assert len(set(noise)) == len(noise)


@run
async def test_what_a_client_leaves_out_is_as_the_model_s_authors_say() -> None:
    defaults = SamplingDefaults({"temperature": 0.25, "top_k": 3}, max_tokens=5)
    for body, max_tokens in (({"messages": CHAT}, 5), ({"messages": CHAT, "max_tokens": 7}, 7), ({}, 16)):
        h = HttpHarness(defaults)
        answer = h.post(**body)
        await settle()
        [admit] = h.d.of(Admit)
        assert (admit.sampling.temperature, admit.sampling.top_k) == (0.25, 3)
        assert admit.sampling.max_tokens == max_tokens
        answer.cancel()


@run
async def test_unknown_fields_are_taken_and_counted() -> None:
    h = HttpHarness()
    answer = h.post(max_tokens=5, frobnicate=True, and_another={})
    await h.answer(b"hello")
    assert (await answer).status == 200
    assert b"tandem_unknown_fields_total 2.0" in h.router.metrics.exposition()


@run
async def test_a_page_s_stream_says_that_it_may_be_read() -> None:
    h = HttpHarness(allowed_origins=("*",))
    answer = h.post({"origin": "https://any.example"}, max_tokens=5, stream=True)
    await h.answer(b"hello")
    response = await answer
    assert response.headers["access-control-allow-origin"] == "*"
    assert "".join(chunk["choices"][0]["text"] for chunk in response.chunks) == "hello"


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
        response = await HttpHarness().post(None, **{name: "x" * 257})
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
