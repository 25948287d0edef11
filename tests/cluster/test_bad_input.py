"""Each frontend answers bad input with one clear error, and the cluster keeps serving."""

import contextlib
import json
import socket
from collections.abc import Iterator, Sequence

import grpc
import openai
import pytest

from tandem.v1 import inference_pb2 as pb
from tests.cluster.bad_input import (
    CHATS,
    COMPLETIONS,
    JSON,
    MAX_BODY_BYTES,
    MESSAGES,
    NUM_LARGE_BYTES,
    ROWS,
    SHOWN_APART,
    Row,
)
from tests.cluster.conftest import API_KEYS, ServedCluster, wait_until
from tests.cluster.faults import LiveStream, frozen, wait_whole
from tests.cluster.wire import HttpAnswer, RawGrpc, http

GOOD = {"prompt": "hi", "max_tokens": 2, "temperature": 0}
FROZEN_S = 10.0


@pytest.fixture
def raw(tiny_pd: ServedCluster) -> Iterator[RawGrpc]:
    with RawGrpc(tiny_pd.cluster.addresses.grpc) as raw:
        yield raw


@pytest.fixture
def raw_keyed(tiny_keyed: ServedCluster) -> Iterator[RawGrpc]:
    with RawGrpc(tiny_keyed.cluster.addresses.grpc) as raw:
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


# --- with API keys -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "key"), [("no API key", ""), ("wrong API key", "first-ke")])
def test_key_is_required(tiny_keyed: ServedCluster, raw_keyed: RawGrpc, name: str, key: str) -> None:
    row = SHOWN_APART[name]
    refusal = raw_keyed.refusal(good_grpc(tiny_keyed), key)
    assert refusal == (row.grpc_code, row.message)
    for path in (COMPLETIONS, CHATS):
        # Without a valid key, the error says nothing about the body.
        for body in (json.dumps(GOOD).encode(), b"{", b""):
            answer = post(tiny_keyed, body, path, key)
            assert_http_error(answer, row)
            assert answer.headers["www-authenticate"] == "Bearer"
    for key in API_KEYS:
        assert raw_keyed.generate(good_grpc(tiny_keyed), key)[-1].finish_reason
        assert post(tiny_keyed, json.dumps(GOOD).encode(), key=key).status == 200


def test_only_what_was_sent_is_resumed(tiny_keyed: ServedCluster, raw_keyed: RawGrpc) -> None:
    own, other = API_KEYS
    asked = tiny_keyed.request([104, 105], max_tokens=6, ignore_eos=True)
    responses = raw_keyed.generate(asked.SerializeToString(), own)
    told = [response for response in responses if response.token_ids]
    resume = pb.Resume(
        token=next(response.resume_token for response in told if response.resume_token),
        token_ids=[i for response in told[:-1] for i in response.token_ids],
        num_characters=sum(len(response.text) for response in told[:-1]),
        proof=told[-2].resume_proof,
    )

    def resumed(token: bytes = resume.token, token_ids: Sequence[int] = resume.token_ids, priority: int = 0) -> bytes:
        again = pb.GenerateRequest()
        again.CopyFrom(asked)
        again.priority = priority
        again.resume.CopyFrom(resume)
        again.resume.token = token
        again.resume.token_ids[:] = list(token_ids)
        return again.SerializeToString()

    rest = raw_keyed.generate(resumed(), own)
    whole = [i for response in responses for i in response.token_ids]
    assert [*resume.token_ids, *(i for response in rest for i in response.token_ids)] == whole
    token_ids = list(resume.token_ids)
    invented = [(token_ids[0] + 1) % 300, *token_ids[1:]]
    refused = {
        "made-up resume token": (resumed(token=b"made up"), own),
        "resume token of another cluster": (resumed(token=bytes(len(resume.token))), own),
        "resume token of another key": (resumed(), other),
        "resume token of another request": (resumed(priority=1), own),
        "made-up output to resume": (resumed(token_ids=invented), own),
    }
    for name, (request, key) in refused.items():
        row = SHOWN_APART[name]
        assert raw_keyed.refusal(request, key) == (row.grpc_code, row.message), name


def test_only_own_event_ids_are_resumed(tiny_keyed: ServedCluster) -> None:
    own, other = API_KEYS
    asked = GOOD | {"stream": True, "max_tokens": 6}

    def send(body: dict[str, object], key: str, event_id: str = "") -> HttpAnswer:
        headers = {"content-type": JSON, "authorization": f"Bearer {key}"}
        headers |= {"last-event-id": event_id} if event_id else {}
        return http(tiny_keyed, "POST", COMPLETIONS, json.dumps(body).encode(), headers)

    lines = send(asked, own).body.decode().splitlines()
    event_ids = [line.removeprefix("id: ") for line in lines if line.startswith("id: ")]
    rest = send(asked, own, event_ids[0]).body.decode().splitlines()
    assert [line for line in rest if line.startswith("id: ")][-1] == f"id: {event_ids[-1]}"
    made_up = f"{'A' * 22}.1.1"
    for name, body, key, event_id in (
        ("malformed event id", asked, own, "17"),
        ("event id of another stream or key", asked, own, made_up),
        ("event id of another stream or key", asked, other, event_ids[0]),
        ("event id of another body", asked | {"max_tokens": 7}, own, event_ids[0]),
    ):
        assert_http_error(send(body, key, event_id), SHOWN_APART[name])


def test_requests_per_key_are_limited(tiny_keyed: ServedCluster, raw_keyed: RawGrpc) -> None:
    row = SHOWN_APART["too many requests of one key"]
    own, other = API_KEYS
    streams = [LiveStream(tiny_keyed, [i] * 20, max_tokens=480, ignore_eos=True) for i in range(2)]
    assert all(stream.wait_tokens(1) for stream in streams)
    body = json.dumps(GOOD).encode()
    assert raw_keyed.refusal(good_grpc(tiny_keyed), own) == (row.grpc_code, row.message)
    assert_http_error(post(tiny_keyed, body, key=own), row)
    assert post(tiny_keyed, body, key=other).status == 200
    assert not any(stream.ended for stream in streams), "the streams were too short for this test"
    for stream in streams:
        assert len(stream.finish().token_ids) == 480
    assert post(tiny_keyed, body, key=own).status == 200


def test_request_size_limit_is_exact(tiny_keyed: ServedCluster, raw_keyed: RawGrpc) -> None:
    limit, key = 4096, API_KEYS[0]
    body = json.dumps(GOOD).encode()
    request = good_grpc(tiny_keyed)
    for num_bytes in (limit, limit + 1):
        # Pad with unknown field number 1000.
        num_padding = num_bytes - len(request) - 4
        padded = request + b"\xc2\x3e" + bytes((num_padding & 0x7F | 0x80, num_padding >> 7)) + bytes(num_padding)
        assert len(padded) == num_bytes
        if num_bytes == limit:
            assert raw_keyed.generate(padded, key)[-1].finish_reason
        else:
            assert raw_keyed.refusal(padded, key)[0] == "RESOURCE_EXHAUSTED"
    assert post(tiny_keyed, body.ljust(limit), key=key).status == 200
    assert post(tiny_keyed, body.ljust(limit + 1), key=key).status == 413
    headers = {"content-type": JSON, "authorization": f"Bearer {key}"}
    for num_bytes, status in ((limit, 200), (limit + 1, 413)):
        padded = body.ljust(num_bytes)
        parts = [padded[start : start + 1000] for start in range(0, num_bytes, 1000)]
        assert http(tiny_keyed, "POST", COMPLETIONS, parts, headers).status == status


def test_missing_workers_are_reported(tiny_keyed: ServedCluster, raw_keyed: RawGrpc) -> None:
    row = SHOWN_APART["no worker"]
    with frozen(tiny_keyed, ["prefill-0", "decode-0"]):
        wait_until(lambda: not tiny_keyed.client.server_info().workers, FROZEN_S, "the workers count as lost")
        assert raw_keyed.refusal(good_grpc(tiny_keyed), API_KEYS[0]) == (row.grpc_code, row.message)
        assert_http_error(post(tiny_keyed, json.dumps(GOOD).encode(), key=API_KEYS[0]), row)
        streamed = json.dumps(GOOD | {"stream": True}).encode()
        assert_http_error(post(tiny_keyed, streamed, key=API_KEYS[0]), row)
        ready = http(tiny_keyed, "GET", "/ready")
        assert (ready.status, ready.json["reason"]) == (503, "no prefill and no decode worker is connected")
        assert http(tiny_keyed, "GET", "/health").status == 200
    wait_whole(tiny_keyed)


# --- without API keys --------------------------------------------------------------------------------------------


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
