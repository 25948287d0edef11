"""Answers and errors of OpenAI-compatible servers."""

import asyncio
import json
import os
import re
import resource
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest

from tandem.bench.clients.base import EndpointConfig, EndpointError, RequestError
from tandem.bench.clients.openai import OpenAIBenchClient
from tandem.bench.clients.table import check_endpoint
from tandem.bench.records import RequestRecord
from tandem.bench.workloads.base import PromptPart
from tests.conftest import Certificates

PARTS = [PromptPart("user", 2, text="why not")]
Answerer = Callable[[str, dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(answer: Answerer, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Run a server with this answer; yield its base URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lengths = [line for line in head.lower().split("\r\n") if line.startswith("content-length:")]
                body = await reader.readexactly(int(lengths[0].split(":")[1]))
                await answer(head, json.loads(body or b"{}"), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"{'https' if context else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


def events(*contents: Any) -> bytes:
    lines = [content if isinstance(content, bytes) else json.dumps(content).encode() for content in contents]
    body = b"".join(b"data: " + line + b"\n\n" for line in lines)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def text(content: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": content, "finish_reason": reason}], **more}


def usage(num_tokens: int, cached: int | None = None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    return {"usage": {"prompt_tokens": 5, "completion_tokens": num_tokens, "prompt_tokens_details": details}}


def ask(answer: bytes | Answerer, **config: Any) -> tuple[RequestRecord, Any]:
    """Send one request; return its record, and the answer or the error."""

    async def always(head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        assert isinstance(answer, bytes)
        writer.write(answer)

    async def main() -> tuple[RequestRecord, Any]:
        async with serving(always if isinstance(answer, bytes) else answer) as url:
            client = OpenAIBenchClient(EndpointConfig(url, model="m", **config))
            record = RequestRecord(0, "requests", 0.0, 0.0, 2, 3)
            clock = count().__next__
            try:
                return record, await client.send(client.prepare(PARTS, 3), record, lambda: float(clock()))
            except RequestError as error:
                return record, error
            finally:
                await client.close()

    return asyncio.run(main())


def test_a_chunk_for_each_token_is_counted_by_the_usage_at_the_end() -> None:
    record, answer = ask(events(text("a"), text(" b"), text("", "length"), {"choices": [], **usage(2, 4)}, b"[DONE]"))
    assert answer.text == "a b" and answer.token_ids is None
    assert (record.counted_by, list(record.counts), record.num_output_tokens) == ("usage", [1, 1], 2)
    assert (record.prompt_tokens, record.cached_tokens, record.loaded_tokens) == (5, 4, {})
    assert len(record.times) == 2


def test_cached_tokens_of_the_page_store_are_taken_by_tier() -> None:
    end = {"choices": [], **usage(1, 4)}
    end["usage"]["prompt_tokens_details"] |= {"host_tokens": 3, "disk_tokens": 1, "peer_tokens": 0}
    record, _ = ask(events(text("a", "length"), end, b"[DONE]"))
    assert record.loaded_tokens == {"host_tokens": 3, "disk_tokens": 1, "peer_tokens": 0}


def test_continuous_usage_counts_each_chunk_exactly() -> None:
    record, _ = ask(events(text("a", **usage(1)), text(" b c", **usage(4)), text("", "length", **usage(4)), b"[DONE]"))
    assert (record.counted_by, list(record.counts), record.num_output_tokens) == ("continuous_usage", [1, 3], 4)


def test_tokens_without_text_count_with_usage() -> None:
    record, _ = ask(events(text("a", **usage(1)), text("", **usage(2)), text("é", **usage(3)), b"[DONE]"))
    assert (record.counted_by, list(record.counts)) == ("continuous_usage", [1, 1, 1])


def test_several_tokens_in_a_chunk_are_shared_out_by_characters() -> None:
    record, _ = ask(events(text("ab"), text("abcdef"), {"choices": [], **usage(8)}, b"[DONE]"))
    assert (record.counted_by, list(record.counts), record.num_output_tokens) == ("characters", [2, 6], 8)


def test_without_any_count_each_chunk_is_one() -> None:
    record, _ = ask(events(text("ab"), text("c"), b"[DONE]"))
    assert (record.counted_by, list(record.counts), record.num_output_tokens) == ("chunks", [1, 1], 2)
    assert record.prompt_tokens is None


@pytest.mark.parametrize("name", ["content", "reasoning_content", "reasoning"])
def test_chat_chunks_have_deltas_and_the_role_is_no_token(name: str) -> None:
    def delta(**content: str) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": content, "finish_reason": None}]}

    record, answer = ask(events(delta(role="assistant", content=""), delta(**{name: "a"}), b"[DONE]"), api="chat")
    assert len(record.times) == 1 and answer.text == "a"


def test_request_bodies() -> None:
    seen: list[tuple[str, dict[str, Any]]] = []

    async def note(head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        seen.append((head, body))
        writer.write(events(b"[DONE]"))

    ask(note, api_key="secret", headers=(("x-tenant", "one"),), continuous_usage=True)
    ask(note, api="chat", ignore_eos=False)
    (head, body), (chat_head, chat_body) = seen
    assert head.startswith("POST /v1/completions HTTP/1.1\r\n") and chat_head.startswith("POST /v1/chat/completions")
    assert "authorization: Bearer secret\r\n" in head and "x-tenant: one\r\n" in head
    options = {"include_usage": True, "continuous_usage_stats": True}
    common = {"model": "m", "max_tokens": 3, "temperature": 0.0, "stream": True}
    assert body == {**common, "stream_options": options, "ignore_eos": True, "prompt": "why not"}
    messages = [{"role": "user", "content": "why not"}]
    assert chat_body == {**common, "stream_options": {"include_usage": True}, "messages": messages}


def response(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("answer", "kind", "detail"),
    [
        (response("429 X", b'{"error": {"message": "a full queue"}}'), "refused", "429: a full queue"),
        (response("400 X", b"plain words"), "refused", "400: plain words"),
        (response("503 X", b"{}"), "failed", "503: {}"),
        (events(text("a"), {"error": {"message": "no pages"}}, b"[DONE]"), "failed", "no pages"),
        (events(text("a")), "failed", "without its end"),
        (events(text("a"), b"{", b"[DONE]"), "failed", "is not what OpenAI's API has"),
        (events(text("a"), {"choices": 5}, b"[DONE]"), "failed", "is not what OpenAI's API has"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "failed", "is not HTTP"),
    ],
)
def test_errors_by_their_kind(answer: bytes, kind: str, detail: str) -> None:
    _, error = ask(answer)
    assert isinstance(error, RequestError) and error.kind == kind and detail in str(error)


def test_broken_stream_fails_and_keeps_its_tokens() -> None:
    async def broken(head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(events(text("a"), text("b"), b"[DONE]")[:-20])
        await writer.drain()
        writer.close()

    record, error = ask(broken)
    assert isinstance(error, RequestError) and error.kind == "failed"
    assert record.num_output_tokens == len(record.times) >= 1


def test_endless_stream_times_out() -> None:
    async def silent(head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(events(text("a"), b"[DONE]")[:-5])

    _, error = ask(silent, timeout_s=0.2)
    assert isinstance(error, RequestError) and error.kind == "timeout"


def test_connections_are_reused_and_a_closed_one_is_replaced() -> None:
    writers: list[asyncio.StreamWriter] = []

    async def note(head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if len(writers) == 2:
            # Closed when the next request arrives, before any answer.
            writers.append(writer)
            writer.transport.abort()
            return
        writers.append(writer)
        writer.write(events(text("a"), b"[DONE]"))

    async def main() -> None:
        async with serving(note) as url:
            client = OpenAIBenchClient(EndpointConfig(url, model="m"))
            for _ in range(3):
                record = RequestRecord(0, "requests", 0.0, 0.0, 2, 1)
                await client.send(client.prepare(PARTS, 1), record, lambda: 0.0)
                assert record.num_output_tokens == 1
            await client.close()

    asyncio.run(main())
    assert writers[0] is writers[1] is writers[2] and writers[3] is not writers[2]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (response("401 X", b'{"error": {"message": "a wrong key"}}'), "401: a wrong key"),
        (response("200 OK", b'{"data": []}'), "names no model"),
        (response("200 OK", b"<html>"), "names no model"),
    ],
)
def test_unmeasurable_server(answer: bytes, message: str) -> None:
    async def always(head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    async def main() -> None:
        async with serving(always) as url:
            with pytest.raises(EndpointError, match=message):
                await OpenAIBenchClient(EndpointConfig(url)).open()

    asyncio.run(main())


def test_the_servers_first_model_is_taken_and_one_without_a_list_needs_a_name() -> None:
    async def first(head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(response("200 OK", b'{"data": [{"id": "one"}, {"id": "two"}]}'))

    async def none(head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(response("404 X", b""))

    async def main() -> None:
        async with serving(first) as url:
            assert (await OpenAIBenchClient(EndpointConfig(url)).open()).model == "one"
        async with serving(none) as url:
            assert (await OpenAIBenchClient(EndpointConfig(url, model="mine")).open()).model == "mine"

    asyncio.run(main())


def test_a_url_without_its_path_is_hinted_at() -> None:
    async def absent(head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(response("404 X", b"not found"))

    async def main() -> None:
        async with serving(absent) as url:
            with pytest.raises(EndpointError, match="ends in /v1"):
                await OpenAIBenchClient(EndpointConfig(url.removesuffix("/v1"))).open()

    asyncio.run(main())


def test_over_tls_the_named_authorities_alone_are_trusted(certificates: Certificates) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.cert, certificates.key)
    context.load_verify_locations(certificates.ca)
    context.verify_mode = ssl.CERT_REQUIRED

    async def models(head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(response("200 OK", b'{"data": [{"id": "one"}]}'))

    async def main() -> None:
        async with serving(models, context) as url:
            shown: dict[str, Any] = {"tls_cert": certificates.client_cert, "tls_key": certificates.client_key}
            client = OpenAIBenchClient(EndpointConfig(url, tls_ca=certificates.ca, **shown))
            assert (await client.open()).model == "one"
            await client.close()
            for wrong in ({"tls_ca": certificates.other_ca, **shown}, shown):
                with pytest.raises(EndpointError, match="no server answers"):
                    await OpenAIBenchClient(EndpointConfig(url, **wrong)).open()

    asyncio.run(main())


def delta(reason: str | None = None, **content: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": content, "finish_reason": reason}]}


def test_chunk_with_only_the_count_is_no_output() -> None:
    """Some servers count once, in the chunk with the finish reason, which has no token."""
    last = delta("length", content="") | usage(3)
    record, _ = ask(events(*(delta(content="ab") for _ in range(3)), last, b"[DONE]"), api="chat")
    assert (record.counted_by, list(record.counts), len(record.times)) == ("usage", [1, 1, 1], 3)
    record, _ = ask(events(text("a", "length", **usage(1)), b"[DONE]"))
    assert (list(record.counts), len(record.times)) == ([1], 1)


@pytest.mark.parametrize(
    "part",
    [
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {"refusal": "I"},
        {"content": [{"type": "text", "text": "a"}]},
    ],
)
def test_all_chat_deltas_are_output(part: dict[str, Any]) -> None:
    record, _ = ask(
        events(delta(role="assistant", content=None), *[delta(**part)] * 3, usage(3), b"[DONE]"), api="chat"
    )
    assert (record.counted_by, list(record.counts), len(record.times)) == ("usage", [1, 1, 1], 3)


def test_answer_without_seen_tokens_is_incomplete() -> None:
    """Its first token has no time, so it would only be missing from the TTFTs."""
    _, error = ask(events(text(""), text("", "length"), {"choices": [], **usage(2)}, b"[DONE]"))
    assert isinstance(error, RequestError) and error.kind == "failed" and "--continuous-usage" in str(error)


def test_length_limited_output_without_count_has_max_tokens() -> None:
    record, _ = ask(events(text("ab"), text("c", "length"), b"[DONE]"))
    assert (record.counted_by, list(record.counts), record.num_output_tokens) == ("length", [2, 1], 3)


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [], **usage(-1)},
        {"choices": [], **usage(2**40)},
        {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": "3"}},
        {"choices": [], "usage": {"prompt_tokens": "many", "completion_tokens": 3}},
        text(5),  # type: ignore[arg-type]
        b"[" * 100_000,
    ],
)
def test_malformed_answer_fails_only_its_request(event: Any) -> None:
    record, error = ask(events(text("a", **usage(1)), event, b"[DONE]"))
    assert isinstance(error, RequestError) and "is not what OpenAI's API has" in str(error)
    assert record.num_output_tokens == len(record.times) == 1


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"])
def test_an_answer_may_end_with_its_connection(head: bytes) -> None:
    async def once(_: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(head + events(text("a"), text("b", "stop"), b"[DONE]").partition(b"\r\n\r\n")[2])
        await writer.drain()
        writer.close()

    record, answer = ask(once)
    assert answer.text == "ab" and len(record.times) == 2


def test_an_end_may_be_told_by_the_last_chunk_alone() -> None:
    _, answer = ask(events(text("a"), text("b", "length")))
    assert answer.text == "ab"


def test_closed_idle_connection_is_replaced() -> None:
    """Servers close idle connections after seconds: at low rates, every other request would fail."""

    async def once(head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(events(text("a"), b"[DONE]"))
        await writer.drain()
        asyncio.get_running_loop().call_later(0.02, writer.close)

    async def main() -> None:
        async with serving(once) as url:
            client = OpenAIBenchClient(EndpointConfig(url, model="m"))
            for _ in range(3):
                record = RequestRecord(0, "requests", 0.0, 0.0, 2, 1)
                await client.send(client.prepare(PARTS, 1), record, lambda: 0.0)
                await asyncio.sleep(0.1)
            await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        (b"HTTP/1.1 307 X\r\nlocation: /v1/x/\r\ncontent-length: 0\r\n\r\n", r"307 \(to /v1/x/\)"),
        (b"HTTP/1.1 200 X\r\ncontent-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc", r"compressed \(gzip\)"),
        (b"HTTP/1.1 200 X\r\ncontent-type: text/html\r\ncontent-length: 3\r\n\r\nabc", "it is text/html, not a stream"),
        (b"HTTP/1.1 401 X\r\ncontent-length: 3\r\n\r\nabc", "--api-key"),
    ],
)
def test_errors_state_the_remedy(answer: bytes, detail: str) -> None:
    _, error = ask(answer)
    assert isinstance(error, RequestError) and re.search(detail, str(error))


def test_parts_of_one_role_are_one_message() -> None:
    """Many chat templates refuse two user messages in a row."""
    parts = [PromptPart("system", 1, text="be"), PromptPart("user", 1, text="why"), PromptPart("user", 1, text="not")]
    client = OpenAIBenchClient(EndpointConfig("http://h/v1", api="chat", model="m"))
    body = json.loads(client.prepare(parts, 1).partition(b"\r\n\r\n")[2])
    assert body["messages"] == [{"role": "system", "content": "be"}, {"role": "user", "content": "why not"}]


def test_connection_limit_is_reported() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def main() -> None:
        async with serving(lambda *_: asyncio.sleep(0)) as url:
            client = OpenAIBenchClient(EndpointConfig(url, model="m"))
            next_one = os.dup(0)
            os.close(next_one)
            resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, hard))
            try:
                with pytest.raises(RequestError, match="ulimit -n"):
                    await client.send(client.prepare(PARTS, 1), RequestRecord(0, "requests", 0, 0, 2, 1), lambda: 0.0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    asyncio.run(main())


def test_invalid_port_is_refused_before_the_start() -> None:
    with pytest.raises(ValueError, match="ort"):
        check_endpoint(EndpointConfig("http://127.0.0.1:99999/v1"))
