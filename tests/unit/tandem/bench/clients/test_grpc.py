"""A cluster's answers and errors over gRPC."""

import asyncio
from array import array
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tandem.bench.clients.base import Answer, EndpointConfig, EndpointError, RequestError
from tandem.bench.clients.grpc import GrpcBenchClient
from tandem.bench.records import RequestRecord
from tandem.bench.workloads.base import PromptPart
from tandem.config import TlsConfig
from tandem.rpc.tls import ClientPortTls
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc
from tests.conftest import Certificates

IDS = [PromptPart("system", 1, array("I", [7])), PromptPart("user", 2, array("I", [8, 9]))]


class Servicer(inference_pb2_grpc.InferenceServicer):
    """Answers in chunks of one and of two tokens, or with a status."""

    def __init__(self, status: grpc.StatusCode | None = None, *, is_ready: bool = True, delay_s: float = 0.0) -> None:
        self._status = status
        self._is_ready = is_ready
        self._delay_s = delay_s
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str]] = []

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        yield pb.GenerateResponse(token_ids=[1], text="a")
        if self._status is not None:
            await context.abort(self._status, "in other words")
        await asyncio.sleep(self._delay_s)
        yield pb.GenerateResponse(text="-")
        yield pb.GenerateResponse(
            token_ids=[2, 3],
            text="bc",
            finish_reason=pb.FINISH_REASON_LENGTH,
            usage=pb.Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=3, disk_tokens=1),
            phases=[pb.Phase(name="prefill", start_ms=1.0, duration_ms=2.5)],
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        if self._status is not None:
            await context.abort(self._status, "in other words")
        return pb.ServerInfo(version="9", model="m", ready=self._is_ready, not_ready_reason="no worker")


def ask(
    servicer: Servicer,
    parts: list[PromptPart] = IDS,
    credentials: grpc.ServerCredentials | None = None,
    connect_timeout_s: float = 20.0,
    **config: Any,
) -> tuple[RequestRecord, Any]:
    """Send one request; return its record, and the answer or the error."""

    async def main() -> tuple[RequestRecord, Any]:
        server = grpc.aio.server()
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
        here = "127.0.0.1:0"
        port = server.add_secure_port(here, credentials) if credentials else server.add_insecure_port(here)
        await server.start()
        client = GrpcBenchClient(
            EndpointConfig(f"grpc://127.0.0.1:{port}", connect_timeout_s=connect_timeout_s, **config)
        )
        record = RequestRecord(0, "requests", 0.0, 0.0, 3, 3)
        clock = asyncio.get_running_loop().time
        try:
            await client.open()
            return record, await client.send(client.prepare(parts, 3), record, clock)
        except (RequestError, EndpointError) as error:
            return record, error
        finally:
            await client.close()
            await server.stop(0)

    return asyncio.run(main())


def test_chunks_are_counted_by_their_token_ids() -> None:
    servicer = Servicer()
    record, answer = ask(servicer, api_key="secret", headers=(("X-Tenant", "one"),))
    assert answer == Answer(array("I", [1, 2, 3]), "abc")
    assert (record.counted_by, list(record.counts), record.num_output_tokens) == ("token_ids", [1, 2], 3)
    assert len(record.times) == 2 and record.times[0] <= record.times[1]
    assert (record.prompt_tokens, record.cached_tokens) == (3, 2)
    assert record.loaded_tokens == {"host_tokens": 0, "disk_tokens": 1, "peer_tokens": 0}
    assert record.phases_ms == {"prefill": 2.5}
    [request] = servicer.requests
    assert list(request.token_ids.ids) == [7, 8, 9] and request.model == "m"
    assert (request.sampling.max_tokens, request.sampling.ignore_eos) == (3, True)
    assert servicer.metadata[0]["authorization"] == "Bearer secret" and servicer.metadata[0]["x-tenant"] == "one"


def test_texts_and_chats() -> None:
    servicer = Servicer()
    parts = [PromptPart("system", 1, text="be"), PromptPart("user", 1, text="why")]
    ask(servicer, parts, ignore_eos=False)
    ask(servicer, parts, api="chat")
    text, chat = servicer.requests
    assert text.text == "be why" and not text.sampling.ignore_eos
    assert [(m.role, m.content) for m in chat.chat.messages] == [("system", "be"), ("user", "why")]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "refused"),
        (grpc.StatusCode.INVALID_ARGUMENT, "refused"),
        (grpc.StatusCode.UNAVAILABLE, "failed"),
        (grpc.StatusCode.INTERNAL, "failed"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "timeout"),
    ],
)
def test_errors_by_their_kind(status: grpc.StatusCode, kind: str) -> None:
    class Failing(Servicer):
        async def GetServerInfo(self, request: Any, context: Any) -> Any:
            return pb.ServerInfo(model="m", ready=True)

    record, error = ask(Failing(status))
    assert isinstance(error, RequestError) and error.kind == kind
    assert str(error) == f"{status.name}: in other words"
    assert record.num_output_tokens == 1


def test_a_request_has_a_deadline() -> None:
    _, error = ask(Servicer(delay_s=30), timeout_s=0.3)
    assert isinstance(error, RequestError) and error.kind == "timeout"


def test_unmeasurable_cluster() -> None:
    _, error = ask(Servicer(is_ready=False))
    assert isinstance(error, EndpointError) and "is not ready: no worker" in str(error)
    _, error = ask(Servicer(grpc.StatusCode.UNAUTHENTICATED))
    assert isinstance(error, EndpointError) and "in other words" in str(error)


def test_over_tls_the_named_authorities_alone_are_trusted(certificates: Certificates) -> None:
    tls = ClientPortTls(TlsConfig(certificates.cert, certificates.key, certificates.ca))
    shown: dict[str, Any] = {"tls_cert": certificates.client_cert, "tls_key": certificates.client_key}
    record, _ = ask(Servicer(), credentials=tls.server_credentials(), tls_ca=certificates.ca, **shown)
    assert record.num_output_tokens == 3
    _, error = ask(
        Servicer(), credentials=tls.server_credentials(), connect_timeout_s=2, tls_ca=certificates.other_ca, **shown
    )
    assert isinstance(error, EndpointError)
