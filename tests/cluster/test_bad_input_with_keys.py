"""Bad input to a cluster with API keys and small limits."""

import json
from collections.abc import Iterator, Sequence

import pytest

from tandem.v1 import inference_pb2 as pb
from tests.cluster.bad_input import CHATS, COMPLETIONS, JSON, SHOWN_APART
from tests.cluster.conftest import API_KEYS, ServedCluster, wait_until
from tests.cluster.faults import LiveStream, frozen, wait_whole
from tests.cluster.test_bad_input import GOOD, assert_http_error, good_grpc, post
from tests.cluster.wire import HttpAnswer, RawGrpc, http

FROZEN_S = 10.0


@pytest.fixture
def raw_keyed(tiny_keyed: ServedCluster) -> Iterator[RawGrpc]:
    with RawGrpc(tiny_keyed.cluster.addresses.grpc) as raw:
        yield raw


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
