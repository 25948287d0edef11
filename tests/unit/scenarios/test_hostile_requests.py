"""No client's request stalls other streams: a real router over loopback, and a watched stream with a token each 10 ms.

Without limits, each of these requests blocked the router for 0.4 to 3 s.
"""

import json
import re
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from benchmarks.router_model import write_model_dir
from tandem.router.recalls import WAIT_TIMEOUT_S
from tandem.v1 import inference_pb2 as pb
from tests.fakes.paced_router import PacedRouter
from tests.fakes.raw_http import HEAD, error_of, read_all

pytestmark = pytest.mark.slow

# About 30 ms on an idle machine.
MAX_GAP_S = 0.25
ANSWER_TIMEOUT_S = 30.0
VOCAB_SIZE = 200_000
MAX_MODEL_LEN = 300_000
# This template loops over all earlier messages.
LOOKS_BACK = (
    "{% for m in messages %}{% for o in messages[:loop.index] %}{% if o['role'] == 'tool' %}x{% endif %}{% endfor %}"
    "{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
)
BIAS = dict.fromkeys(range(170_000), 1.0)
TEXT = "def " * 650_000
# The maximum number and length that a body can hold.
UNKNOWN = {f"{i:0240}": 1 for i in range(32_000)}
MESSAGE = {"role": "user", "content": "hello"}
PART = {"type": "text", "text": ""}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PacedRouter]:
    directory: Path = tmp_path_factory.mktemp("model")
    write_model_dir(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "vocab_size": VOCAB_SIZE}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": LOOKS_BACK}))
    with PacedRouter(directory, MAX_MODEL_LEN) as paced:
        yield paced


def post(address: str, path: str, body: bytes) -> bytes:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), ANSWER_TIMEOUT_S) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        return read_all(connection)


def generate(address: str, request: bytes) -> str:
    """Send an encoded request; return the status and message."""
    with grpc.insecure_channel(address) as channel:
        call: Callable[..., Any] = channel.unary_stream("/tandem.v1.Inference/Generate", bytes, bytes)
        try:
            list(call(request, timeout=ANSWER_TIMEOUT_S))
        except grpc.RpcError as error:
            return f"{error.code().name} {error.details()}"
    return "OK"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {"prompt": "hi", "n": 8, "logit_bias": BIAS}, "logit_bias: at most 300 items are taken"),
        ("completions", {"prompt": "hi", "n": 8, "stop_token_ids": [*BIAS]}, "stop_token_ids: List should have at"),
        ("completions", {"prompt": [1] * 2_600_000}, "prompt: at most 349152 items are taken"),
        ("completions", {"prompt": TEXT}, "the prompt is too long: more than "),
        ("chat/completions", {"messages": [MESSAGE] * 8000}, "messages: List should have at most 2048 items"),
        ("chat/completions", {"messages": [MESSAGE] * 150_000}, "messages: at most 2048 items are taken"),
        ("chat/completions", {"messages": [{**MESSAGE, "content": [PART] * 200_000}]}, "the body has more than"),
        ("completions", {**UNKNOWN, "prompt": "hi", "top_p": "x"}, "top_p: Input should be a valid number"),
        (
            "chat/completions",
            {"messages": [{**MESSAGE, "content": [{**PART, 1: 1}] * 6_500}], "top_p": "x"},
            "top_p: Input should be a valid number",
        ),
        ("completions", {"prompt": "hi", **dict.fromkeys(range(500_000))}, "the body has more than 32768 strings"),
        (
            "responses",
            {"input": [{**MESSAGE, "content": [{**PART, "type": "input_text"}] * 3}] * 2000, "tool_choice": "required"},
            "tool_choice asks for a call",
        ),
        (
            "messages",
            {"messages": [{**MESSAGE, "content": [PART] * 3}] * 2000, "max_tokens": 1, "tool_choice": {"type": "any"}},
            "tool_choice asks for a call",
        ),
    ],
    ids=[
        "logit_bias",
        "stop_token_ids",
        "token ids",
        "text",
        "messages",
        "more messages",
        "parts",
        "unknown fields",
        "unknown fields of parts",
        "more unknown fields",
        "items",
        "blocks",
    ],
)
def test_huge_body_stalls_no_stream(router: PacedRouter, path: str, body: dict[str, Any], message: str) -> None:
    encoded = json.dumps(body).encode()
    with router.watched_stream() as gap:
        answer = post(router.addresses.http, f"/v1/{path}", encoded)
    status, said = error_of(answer)
    assert (status, said[: len(message)]) == (400, message)
    assert gap.longest_s < MAX_GAP_S


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(logit_bias=BIAS)), "sampling has more than 131072"),
        (pb.GenerateRequest(text=TEXT), "the prompt is too long: more than "),
    ],
    ids=["logit_bias", "text"],
)
def test_huge_message_stalls_no_stream(router: PacedRouter, request_: pb.GenerateRequest, message: str) -> None:
    encoded = request_.SerializeToString()
    with router.watched_stream() as gap:
        answer = generate(router.addresses.grpc, encoded)
    assert answer.startswith(f"INVALID_ARGUMENT {message}")
    assert gap.longest_s < MAX_GAP_S


def stream_name(address: str, body: bytes) -> str:
    """Begin a stream, leave it after its first event, and return the name in that event's id."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), ANSWER_TIMEOUT_S) as connection:
        connection.sendall(HEAD + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        received = b""
        while (found := re.search(rb"^id: ([\w-]+)\.", received, re.MULTILINE)) is None:
            part = connection.recv(65536)
            assert part, received
            received += part
        return found[1].decode()


def resume_many(router: PacedRouter, names: Sequence[str], body: bytes) -> Counter[tuple[int, str]]:
    """Ask for streams of these names all at once, beside a watched stream; return the answers."""
    host, _, port = router.addresses.http.rpartition(":")
    memory = psutil.Process(router.pid).memory_info
    with ExitStack() as stack, router.watched_stream() as gap:
        connections = [
            stack.enter_context(socket.create_connection((host, int(port)), ANSWER_TIMEOUT_S)) for _ in names
        ]
        before = memory().rss
        for connection, name in zip(connections, names, strict=True):
            last = f"last-event-id: {name}.1.1\r\nconnection: close\r\n"
            connection.sendall(HEAD + f"{last}content-length: {len(body)}\r\n\r\n".encode() + body)
        answers = Counter(error_of(read_all(connection)) for connection in connections)
        grown = memory().rss - before
    print(f"{dict(answers)}: longest gap {gap.longest_s * 1e3:.0f} ms, grown by {grown / 2**20:.1f} MiB")
    assert gap.longest_s < MAX_GAP_S and grown < 32 * 2**20
    return answers


def test_many_lookups_of_a_stream_stall_no_stream(router: PacedRouter) -> None:
    """The workers stay silent, so each lookup lasts as long as allowed."""
    body = json.dumps({"prompt": "hi", "stream": True}).encode()
    answers = resume_many(router, [stream_name(router.addresses.http, body)] * 200, body)
    unsure, crowded = (503, "some workers have not answered"), (429, "too many streams are being looked up")
    kinds = dict(answers.keys())
    assert set(kinds) == {503, 429}
    assert all(kinds[status].startswith(message) for status, message in (unsure, crowded))


def test_guessed_stream_names_are_refused_without_a_lookup(router: PacedRouter) -> None:
    body = json.dumps({"prompt": "hi", "stream": True}).encode()
    began = time.monotonic()
    answers = resume_many(router, [secrets.token_urlsafe(16) for _ in range(200)], body)
    assert {status for status, _ in answers} == {404}
    assert time.monotonic() - began < WAIT_TIMEOUT_S
