"""Each frontend answers bad input with one clear error, and the cluster keeps serving."""

import contextlib
import json
import socket
from collections.abc import Iterator

import grpc
import openai
import pytest

from tandem.v1 import inference_pb2 as pb
from tests.cluster.bad_input import (
    COMPLETIONS,
    JSON,
    MAX_BODY_BYTES,
    MESSAGES,
    NUM_LARGE_BYTES,
    ROWS,
    SHOWN_APART,
    Row,
)
from tests.cluster.conftest import ServedCluster
from tests.cluster.wire import HttpAnswer, RawGrpc, http

GOOD = {"prompt": "hi", "max_tokens": 2, "temperature": 0}
FROZEN_S = 10.0


@pytest.fixture
def raw(tiny_pd: ServedCluster) -> Iterator[RawGrpc]:
    with RawGrpc(tiny_pd.cluster.addresses.grpc) as raw:
        yield raw


def good_grpc(served: ServedCluster) -> bytes:
    return served.request([104, 105], max_tokens=2).SerializeToString()


def post(
    served: ServedCluster, body: bytes, path: str = COMPLETIONS, key: str = "", content_type: str = JSON
) -> HttpAnswer:
    headers = {"content-type": content_type} | ({"authorization": f"Bearer {key}"} if key else {})
    return http(served, "POST", path, body, headers)


def assert_is_clear(message: str) -> None:
    assert message and "\n" not in message and len(message) <= 500
    assert not any(word in message for word in ("Traceback", "Exception", "Unexpected"))


def assert_http_error(answer: HttpAnswer, row: Row) -> None:
    if row.path == MESSAGES:
        content = answer.json
        assert (content.keys(), content["type"]) == ({"type", "error", "request_id"}, "error")
        assert content["error"].keys() - {"details"} == {"type", "message"}
        kind = "not_found_error" if row.status == 404 else "invalid_request_error"
        assert_is_clear(content["error"]["message"])
        assert (answer.status, content["error"]["type"]) == (row.status, kind)
        assert content["error"]["message"] == row.message
        return
    error = answer.error
    assert_is_clear(error["message"])
    assert (answer.status, error["message"]) == (row.status, row.http_message or row.message)
    assert (error["param"], error["code"]) == (row.param, row.code)
    expected = {401: "authentication_error", 429: "rate_limit_error", 503: "server_error"}
    assert error["type"] == expected.get(row.status, "invalid_request_error")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_bad_input_gets_one_clear_error(tiny_pd: ServedCluster, raw: RawGrpc, row: Row) -> None:
    if row.grpc is not None:
        code, message = raw.refusal(row.grpc_bytes, embeds=row.embeds)
        assert (code, message) == (row.grpc_code, row.message)
        assert_is_clear(message)
    if row.http is not None:
        assert_http_error(post(tiny_pd, row.http_bytes, row.path, content_type=row.content_type), row)


def test_large_body_is_refused_early(tiny_pd: ServedCluster) -> None:
    body = b"x" * NUM_LARGE_BYTES
    assert_http_error(post(tiny_pd, body), SHOWN_APART["body of 50 MB, announced"])
    parts = [body[: 2**16]] * (NUM_LARGE_BYTES // 2**16)
    answer = http(tiny_pd, "POST", COMPLETIONS, parts, {"content-type": JSON})
    assert_http_error(answer, SHOWN_APART["body of 50 MB, in chunks"])
    address = tiny_pd.cluster.addresses.http
    with (
        openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=30.0) as client,
        pytest.raises(openai.APIStatusError) as refused,
    ):
        client.completions.create(model="tiny-llama", prompt="x" * NUM_LARGE_BYTES)
    assert (refused.value.status_code, refused.value.type) == (413, "invalid_request_error")
    assert f"{MAX_BODY_BYTES} bytes" in str(refused.value)


def test_compressed_messages_count_uncompressed(tiny_pd: ServedCluster, raw: RawGrpc) -> None:
    request = pb.GenerateRequest(text="x" * NUM_LARGE_BYTES).SerializeToString()
    call = raw.channel.unary_stream("/tandem.v1.Inference/Generate")
    with pytest.raises(grpc.RpcError) as refused:
        list(call(request, compression=grpc.Compression.Gzip, timeout=30.0))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_unknown_paths_and_methods(tiny_pd: ServedCluster, raw: RawGrpc) -> None:
    row = SHOWN_APART["unknown path"]
    assert_http_error(post(tiny_pd, row.http_bytes, row.path), row)
    row = SHOWN_APART["wrong method"]
    answer = post(tiny_pd, row.http_bytes, row.path)
    assert_http_error(answer, row)
    assert answer.headers["allow"] == "GET"
    row = SHOWN_APART["unknown method"]
    with pytest.raises(grpc.RpcError) as refused:
        raw.channel.unary_unary("/tandem.v1.Inference/Nothing")(row.grpc_bytes, timeout=5.0)
    assert (refused.value.code().name, refused.value.details()) == (row.grpc_code, row.message)


def test_other_methods_refuse_malformed_input(tiny_pd: ServedCluster, raw: RawGrpc) -> None:
    garbage = b"\xff" * 5
    with pytest.raises(grpc.RpcError) as refused:
        raw.embed(garbage)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    for method in ("/tandem.v1.Inference/GetServerInfo", "/grpc.health.v1.Health/Check"):
        with pytest.raises(grpc.RpcError) as refused:
            raw.channel.unary_unary(method)(garbage, timeout=5.0)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as refused:
        list(raw.channel.unary_stream("/grpc.health.v1.Health/Watch")(garbage, timeout=5.0))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    reflect = raw.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    with pytest.raises(grpc.RpcError) as refused:
        list(reflect(iter([garbage]), timeout=5.0))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_echoed_input_is_shortened(tiny_pd: ServedCluster, raw: RawGrpc) -> None:
    # gRPC drops status messages above a few thousand bytes.
    model = "\N{SLIGHTLY SMILING FACE}" * 100_000
    code, message = raw.refusal(pb.GenerateRequest(text="hi", model=model).SerializeToString())
    assert code == "INVALID_ARGUMENT"
    assert_is_clear(message)
    answer = post(tiny_pd, json.dumps({"prompt": "hi", "model": model}).encode())
    assert answer.status == 404
    assert answer.error["message"] == message
    answer = post(tiny_pd, json.dumps({"prompt": "hi", "logit_bias": {model: 1}}).encode())
    assert answer.error["message"].startswith("logit_bias: ")
    assert all(len(value) <= 500 for value in answer.error.values() if value)


def test_endless_headers_are_cut(tiny_pd: ServedCluster) -> None:
    row = SHOWN_APART["head of more than 64 KiB"]
    host, _, port = tiny_pd.cluster.addresses.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10.0) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        received = b""
        # The server may close while this end is sending.
        with contextlib.suppress(OSError):
            for number in range(2000):
                connection.sendall(b"x-%d: %s\r\n" % (number, b"y" * 10_000))
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                received += part
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % row.status)
    assert json.loads(body)["error"]["message"] == row.message
