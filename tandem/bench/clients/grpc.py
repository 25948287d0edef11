"""A client for Tandem's gRPC API: every chunk has token ids."""

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from tandem.bench.clients.base import (
    Answer,
    BenchClient,
    Clock,
    EndpointConfig,
    EndpointError,
    RequestError,
    ServerDescription,
    messages,
)
from tandem.bench.records import ErrorKind, RequestRecord
from tandem.bench.workloads.base import PromptPart
from tandem.client.requests import ClientTls, metadata, translate
from tandem.messages import TierHits
from tandem.v1 import inference_pb2 as pb

SCHEME = "grpc://"
_METHODS = "/tandem.v1.Inference/"
# Calls beyond a connection's limit (2,048 at Tandem) would wait at the client but count as the server's time.
NUM_CONNECTIONS = 8
_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
)
_KINDS: dict[grpc.StatusCode, ErrorKind] = {
    grpc.StatusCode.INVALID_ARGUMENT: "refused",
    grpc.StatusCode.UNAUTHENTICATED: "refused",
    grpc.StatusCode.PERMISSION_DENIED: "refused",
    grpc.StatusCode.NOT_FOUND: "refused",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "refused",
    grpc.StatusCode.DEADLINE_EXCEEDED: "timeout",
}


@dataclass(slots=True)
class _Connection:
    channel: grpc.aio.Channel
    generate: Any
    num_calls: int = 0


class GrpcBenchClient(BenchClient):
    """Sends each call over the least used connection."""

    def __init__(self, config: EndpointConfig) -> None:
        self._config = config
        self._address = config.url.removeprefix(SCHEME).rstrip("/")
        self._metadata = (*metadata(config.api_key), *((name.lower(), value) for name, value in config.headers))
        self._connections: list[_Connection] = []
        self._model = config.model

    async def open(self) -> ServerDescription:
        self._connections = [self._connect() for _ in range(NUM_CONNECTIONS)]
        ask: Any = self._connections[0].channel.unary_unary(
            f"{_METHODS}GetServerInfo", pb.GetServerInfoRequest.SerializeToString, pb.ServerInfo.FromString
        )
        try:
            info = await ask(pb.GetServerInfoRequest(), timeout=self._config.connect_timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise EndpointError(str(translate(error, self._address))) from error
        if not info.ready:
            raise EndpointError(f"the cluster at {self._address} is not ready: {info.not_ready_reason}")
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await asyncio.gather(*(connection.channel.channel_ready() for connection in self._connections))
        except TimeoutError as error:
            raise EndpointError(f"{self._address} does not take {NUM_CONNECTIONS} connections") from error
        self._model = self._model or info.model
        workers = ", ".join(f"{worker.worker_id} ({worker.device})" for worker in info.workers)
        return ServerDescription(self._model, f"tandem {info.version}, {workers}")

    def prepare(self, parts: Sequence[PromptPart], num_output_tokens: int) -> bytes:
        sampling = pb.SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=self._config.ignore_eos)
        request = pb.GenerateRequest(model=self._model, sampling=sampling)
        if self._config.api == "chat":
            request.chat.messages.extend(pb.ChatMessage(role=role, content=text) for role, text in messages(parts))
        elif parts[0].token_ids is not None:
            for part in parts:
                request.token_ids.ids.extend(part.token_ids or ())
        else:
            request.text = " ".join(part.text for part in parts)
        return request.SerializeToString()

    async def send(self, prepared: bytes, record: RequestRecord, clock: Clock) -> Answer:
        connection = min(self._connections, key=lambda one: one.num_calls)
        connection.num_calls += 1
        record.counted_by = "token_ids"
        token_ids, texts = array("I"), []
        times, counts, parse = record.times, record.counts, pb.GenerateResponse.FromString
        record.sent_s = clock()
        call = connection.generate(prepared, timeout=self._config.timeout_s, metadata=self._metadata)
        try:
            async for message in call:
                moment = clock()
                response = parse(message)
                if response.token_ids:
                    times.append(moment)
                    counts.append(len(response.token_ids))
                    token_ids.extend(response.token_ids)
                    texts.append(response.text)
                if response.finish_reason:
                    usage = response.usage
                    record.prompt_tokens, record.cached_tokens = usage.prompt_tokens, usage.cached_tokens
                    record.loaded_tokens = TierHits(usage.host_tokens, usage.disk_tokens, usage.peer_tokens).counts()
                    record.phases_ms = {phase.name: phase.duration_ms for phase in response.phases}
        except grpc.RpcError as error:
            raise _request_error(error) from error
        finally:
            record.num_output_tokens = len(token_ids)
            connection.num_calls -= 1
            call.cancel()
        return Answer(token_ids, "".join(texts))

    async def close(self) -> None:
        for connection in self._connections:
            await connection.channel.close()

    def _connect(self) -> _Connection:
        config = self._config
        files = (config.tls_ca, config.tls_cert, config.tls_key)
        if config.tls or any(files):
            channel = grpc.aio.secure_channel(self._address, ClientTls(*files).credentials(), _CHANNEL_OPTIONS)
        else:
            channel = grpc.aio.insecure_channel(self._address, _CHANNEL_OPTIONS)
        return _Connection(channel, channel.unary_stream(f"{_METHODS}Generate"))


def _request_error(error: Any) -> RequestError:
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and details.startswith(("failed to connect", "errors resolving")):
        return RequestError("unreachable", details)
    return RequestError(_KINDS.get(code, "failed"), f"{code.name}: {details}")
