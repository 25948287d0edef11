"""The frontends answer hundreds of random requests, and nothing behind them breaks."""

import contextlib
import itertools
import json
import os
import random
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import jsonschema
import pytest
import ray
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode

from tests.cluster import fuzz
from tests.cluster.bad_input import (
    CHATS,
    COMPLETIONS,
    DETOKENIZE,
    EMBEDDINGS,
    JSON,
    MESSAGES,
    RESPONSES,
    SGLANG,
    TOKENIZE,
)
from tests.cluster.conftest import VOCAB_SIZE, ServedCluster
from tests.cluster.wire import RawGrpc, http

CHECK_NAMES = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
GOOD_HTTP = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()


def fuzzing(num_examples: int) -> settings:
    """Repeat the same examples, unshrunk: the first failure says enough."""
    return settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )


def amount(few: int, many: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "num_examples",
        [
            pytest.param(few, marks=pytest.mark.timeout(600)),
            pytest.param(many, marks=(pytest.mark.slow, pytest.mark.timeout(3600))),
        ],
    )


def processes(served: ServedCluster) -> dict[str, int]:
    router_pid = ray.get(served.cluster.actor("router-0").__ray_call__.remote(lambda actor: os.getpid()))
    return {"router": router_pid} | {w.worker_id: w.pid for w in served.client.server_info().workers}


def troubles(served: ServedCluster) -> dict[str, float]:
    """Return counts of faults, restarts and failed requests from the router's metrics."""
    text = http(served, "GET", "/metrics").body.decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        f"{sample.name} {sample.labels}": sample.value
        for sample in samples
        if sample.name in ("tandem_faults_total", "tandem_restarts_total")
        or sample.labels.get("outcome") in ("error", "unavailable", "timeout")
    }


@pytest.fixture
def unharmed(tiny_pd: ServedCluster) -> Iterator[ServedCluster]:
    """Yield a cluster that must be unchanged afterwards."""
    tiny_pd.wait_clean()
    before, troubles_before = processes(tiny_pd), troubles(tiny_pd)
    yield tiny_pd
    tiny_pd.wait_clean()
    assert processes(tiny_pd) == before
    assert troubles(tiny_pd) == troubles_before
    (prefill,) = (w for w in tiny_pd.client.server_info().workers if w.role == "prefill")
    assert list(prefill.linked_to) == ["decode-0"]
    assert_serves(tiny_pd)


def assert_serves(served: ServedCluster) -> None:
    assert served.complete([1, 2, 3], max_tokens=2, ignore_eos=True).token_ids
    assert http(served, "POST", COMPLETIONS, GOOD_HTTP, {"content-type": JSON}).status == 200


# --- HTTP, from its OpenAPI description --------------------------------------------------------------------------


MAX_N = 128


LIMITS = {
    COMPLETIONS: ("max_tokens",),
    CHATS: ("max_tokens", "max_completion_tokens"),
    RESPONSES: ("max_output_tokens",),
    MESSAGES: ("max_tokens",),
}


def shorten(path: str, body: Any) -> None:
    """Limit the output length, because even a tiny model is slow."""
    if not isinstance(body, dict):
        return
    if path == SGLANG and isinstance(sampling := body.get("sampling_params"), dict):
        if isinstance(sampling.get("max_new_tokens"), int) and sampling["max_new_tokens"] > 3:
            sampling["max_new_tokens"] = 3
        sampling.setdefault("max_new_tokens", 3)
    if path not in LIMITS:
        return
    for name in LIMITS[path]:
        if isinstance(body.get(name), int) and body[name] > 3:
            body[name] = 3
    if not set(LIMITS[path]) & set(body) and path != MESSAGES:
        body[LIMITS[path][0]] = 3
    # Values above the description's limit stay, to be refused.
    if isinstance(body.get("n"), int) and 4 < body["n"] <= MAX_N:
        body["n"] = 4


# The description allows more values here than the model.
ODD = ("model", "logit_bias", "stop_token_ids", "cache_namespace", "cache_salt", "session_id")


def tame(body: dict[str, Any]) -> None:
    """Make a body valid for the model, given that the description allows it."""
    for name in (*ODD, "stop", "top_logprobs", "stream_options"):
        body.pop(name, None)
    if body.get("stream"):
        for name in ("prompt_logprobs", "echo"):
            body.pop(name, None)
    if isinstance(body.get("min_tokens"), int):
        body["min_tokens"] %= 2
    if "max_completion_tokens" in body:
        body.pop("max_tokens", None)
    prompt = body.get("prompt")
    if not prompt or not all(prompt):
        body["prompt"] = prompt = "hi"
    if isinstance(prompt, list) and not isinstance(prompt[0], str):
        body["prompt"] = [
            [i % VOCAB_SIZE for i in item] if isinstance(item, list) else item % VOCAB_SIZE for item in prompt
        ]
    # A completion may have `messages: null`.
    if body.get("messages"):
        body.pop("prompt")
        for message in body["messages"]:
            # The description cannot require content per role.
            if message.get("content") is None:
                message["content"] = "hi"


def tame_response(body: dict[str, Any]) -> None:
    for name in (
        *ODD,
        "min_tokens",
        "previous_response_id",
        "tools",
        "tool_choice",
        "chat_template_kwargs",
        "include",
        "text",
    ):
        body.pop(name, None)
    if isinstance(body["input"], list):
        body["input"] = [item for item in body["input"] if "role" in item] or "hi"


def tame_message(body: dict[str, Any]) -> None:
    for name in (*ODD, "min_tokens", "stop_sequences", "tools", "tool_choice", "chat_template_kwargs", "output_config"):
        body.pop(name, None)
    body.pop("output_format", None)
    for message in body["messages"]:
        # The description allows any blocks in any role, and any role last.
        message["role"] = "user"
        if isinstance(message["content"], list):
            message["content"] = [block for block in message["content"] if "text" in block]


TAMERS = {COMPLETIONS: tame, CHATS: tame, RESPONSES: tame_response, MESSAGES: tame_message}


def violates(description: dict[str, Any], path: str, body: Any) -> bool:
    """Return whether the OpenAPI document forbids this body."""
    place = path.replace("/", "~1")
    schema = {**description, "$ref": f"#/paths/{place}/post/requestBody/content/application~1json/schema"}
    return not jsonschema.Draft202012Validator(schema).is_valid(body)


@amount(2, 1000)
def test_http_conforms_to_openapi(unharmed: ServedCluster, num_examples: int) -> None:
    load_all_checks()
    checks = CHECKS.get_by_names([*CHECK_NAMES, "negative_data_rejection"])
    harmless_checks = CHECKS.get_by_names(list(CHECK_NAMES))
    description = http(unharmed, "GET", "/openapi.json").json
    schema = schemathesis.openapi.from_dict(description)
    schema.config.update(base_url=f"http://{unharmed.cluster.addresses.http}")
    statuses: Counter[int] = Counter()
    with requests.Session() as session:
        session.trust_env = False

        def check_operation(operation: Any, mode: GenerationMode, tamed: bool) -> None:
            @fuzzing(num_examples)
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: Any) -> None:
                shorten(operation.path, case.body)
                if tamed:
                    TAMERS[operation.path](case.body)
                response = case.call(session=session, timeout=30.0)
                statuses[response.status_code] += 1
                # Another alternative of the field may allow it.
                is_bad = mode is GenerationMode.NEGATIVE and violates(description, operation.path, case.body)
                case.validate_response(response, checks=checks if is_bad else harmless_checks)

            check()

        for result in schema.get_all_operations():
            assert isinstance(result, Ok)
            operation = result.ok()
            check_operation(operation, GenerationMode.POSITIVE, tamed=False)
            if operation.path in TAMERS:
                check_operation(operation, GenerationMode.POSITIVE, tamed=True)
            if operation.path in (*TAMERS, TOKENIZE, DETOKENIZE, SGLANG, EMBEDDINGS):
                check_operation(operation, GenerationMode.NEGATIVE, tamed=False)
    print(dict(statuses))
    # 403: loading adapters, without an admin key.
    assert set(statuses) <= {200, 400, 403, 404}
    assert min(statuses[200], statuses[400]) >= num_examples


# --- gRPC --------------------------------------------------------------------------------------------------------


@amount(120, 5000)
@pytest.mark.parametrize(
    "kind", ["requests", "bytes_of_requests", "embed_requests", "bytes_of_embed_requests", "random_bytes"]
)
def test_grpc_answers_everything(unharmed: ServedCluster, kind: str, num_examples: int) -> None:
    codes: Counter[str] = Counter()

    with RawGrpc(unharmed.cluster.addresses.grpc) as raw:

        @fuzzing(num_examples)
        @given(getattr(fuzz, kind))
        def check(request: Any) -> None:
            data = request if isinstance(request, bytes) else request.SerializeToString()
            try:
                responses: Any = raw.embed(data) if "embed" in kind else raw.generate(data)
            except grpc.RpcError as error:
                codes[error.code().name] += 1
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
                assert error.details() and "\n" not in error.details()
            else:
                codes["OK"] += 1
                assert responses[-1].values if "embed" in kind else responses[-1].finish_reason

        check()
    print(dict(codes))
    assert codes["INVALID_ARGUMENT"] > num_examples // 20
    if kind != "random_bytes":
        assert codes["OK"] > num_examples // 20


# --- bytes -------------------------------------------------------------------------------------------------------

HTTP_REQUEST = b"".join(
    (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n",
        b"authorization: Bearer none\r\naccept: */*\r\ncontent-length: %d\r\n\r\n" % len(GOOD_HTTP),
        GOOD_HTTP,
    )
)
CHUNKED_REQUEST = (
    b"POST /v1/chat/completions?a=%41 HTTP/1.1\r\nhost: x\r\ncontent-type: application/json; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
)
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
TLS_HELLO = bytes.fromhex("160301020001fc0303") + bytes(40)


def exchange(address: str, data: bytes) -> bytes:
    """Return the first answer, or b"" if none comes soon."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=0.1) as connection:
        connection.sendall(data)
        return connection.recv(65536)
    return b""


@amount(100, 3000)
def test_http_survives_any_bytes(unharmed: ServedCluster, num_examples: int) -> None:
    originals = st.sampled_from([HTTP_REQUEST, CHUNKED_REQUEST, HTTP_REQUEST * 2, HTTP2_PREFACE, TLS_HELLO])
    statuses: Counter[int] = Counter()

    @fuzzing(num_examples)
    @given(st.binary(max_size=200) | fuzz.mutated(originals) | fuzz.mutated(originals) | originals)
    def check(data: bytes) -> None:
        answer = exchange(unharmed.cluster.addresses.http, data)
        if answer:
            assert answer.startswith(b"HTTP/1.")
            status = int(answer.split(b" ", 2)[1])
            statuses[status] += 1
            assert 100 <= status < 500

    check()
    print(dict(statuses))
    assert statuses[200] and statuses[400]


@amount(100, 3000)
def test_grpc_survives_any_bytes(unharmed: ServedCluster, num_examples: int) -> None:
    originals = st.sampled_from([HTTP2_PREFACE, HTTP2_PREFACE + bytes(200), HTTP_REQUEST, TLS_HELLO])

    @fuzzing(num_examples)
    @given(st.binary(max_size=200) | fuzz.mutated(originals) | originals)
    def check(data: bytes) -> None:
        exchange(unharmed.cluster.addresses.grpc, data)

    check()


def test_partial_requests_block_no_other_client(unharmed: ServedCluster) -> None:
    rng = random.Random(3)
    addresses = unharmed.cluster.addresses
    with contextlib.ExitStack() as stack:
        for address, request in itertools.product((addresses.http, addresses.grpc), (HTTP_REQUEST, HTTP2_PREFACE)):
            host, _, port = address.rpartition(":")
            for _ in range(50):
                connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=5.0))
                connection.sendall(request[: rng.randrange(len(request))])
        assert_serves(unharmed)
    assert_serves(unharmed)
