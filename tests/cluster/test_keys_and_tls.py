"""API keys on everything but health, TLS and client certificates on both ports, the cluster token."""

import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.client import ClientTls, TandemClient, TandemError
from tandem.config import TlsConfig
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.host.ports import ClientAddresses
from tandem.router.config import RouterAddresses, RouterConfig
from tandem.router.process import RouterProcess
from tandem.rpc.auth import cluster_metadata
from tandem.rpc.codec import WORKER_CODEC
from tandem.v1 import worker_pb2, worker_pb2_grpc
from tests.cluster.conftest import API_KEYS, Clusters, ServedCluster, keyed
from tests.cluster.wire import GENERATE, RawGrpc, http
from tests.conftest import Certificates
from tests.fakes.scripted_worker import hello

MODEL = "tiny-llama"
TIMEOUT_S = 5.0
Chain = tuple[str, str] | None


# --- TLS ---------------------------------------------------------------------------------------------------------


def tls_context(ca: str, chain: Chain = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca)
    if chain is not None:
        context.load_cert_chain(*chain)
    return context


def openai_client(address: str, context: ssl.SSLContext) -> openai.OpenAI:
    http_client = openai.DefaultHttpxClient(verify=context, trust_env=False)
    return openai.OpenAI(
        base_url=f"https://{address}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S, http_client=http_client
    )


def assert_refused_on_both_ports(addresses: ClientAddresses | RouterAddresses, ca: str, chain: Chain) -> None:
    tls = ClientTls(ca, *(chain or ()))
    with TandemClient(addresses.grpc, tls=tls) as client, pytest.raises(TandemError) as refused:
        client.server_info(timeout_s=TIMEOUT_S)
    assert refused.value.code == "UNAVAILABLE"
    with openai_client(addresses.http, tls_context(ca, chain)) as client, pytest.raises(openai.APIConnectionError):
        client.models.list()


def assert_plain_is_refused(addresses: ClientAddresses | RouterAddresses) -> None:
    with TandemClient(addresses.grpc) as client, pytest.raises(TandemError):
        client.server_info(timeout_s=TIMEOUT_S)
    with pytest.raises((URLError, ConnectionError)):
        build_opener(ProxyHandler({})).open(f"http://{addresses.http}/health", timeout=TIMEOUT_S)


def test_clients_with_a_certificate_are_served_on_both_ports(
    tiny_tls: ServedCluster, certificates: Certificates
) -> None:
    over_grpc = "".join(r.text for r in tiny_tls.client.complete("hi", max_tokens=8, ignore_eos=True))
    context = tls_context(certificates.ca, (certificates.client_cert, certificates.client_key))
    with openai_client(tiny_tls.cluster.addresses.http, context) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        options: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
        whole = client.completions.create(model=MODEL, prompt="hi", **options).choices[0].text
        chunks = client.completions.create(model=MODEL, prompt="hi", stream=True, **options)
        assert whole == over_grpc == "".join(chunk.choices[0].text for chunk in chunks)
        request = Request(f"https://{tiny_tls.cluster.addresses.http}/sd")
        with build_opener(ProxyHandler({}), HTTPSHandler(context=context)).open(request, timeout=TIMEOUT_S) as answer:
            assert b'"__scheme__":"https"' in answer.read()


def test_clients_without_a_certificate_are_refused_on_both_ports(
    tiny_tls: ServedCluster, certificates: Certificates
) -> None:
    addresses = tiny_tls.cluster.addresses
    assert_refused_on_both_ports(addresses, certificates.ca, None)
    # Clients without the server's authority refuse too.
    chain = (certificates.client_cert, certificates.client_key)
    assert_refused_on_both_ports(addresses, certificates.other_ca, chain)
    assert_plain_is_refused(addresses)
    assert tiny_tls.client.server_info().ready


def test_tls_without_client_authority_needs_no_certificate(tiny_model_dir: Path, certificates: Certificates) -> None:
    # A router without workers suffices.
    tls = TlsConfig(certificates.cert, certificates.key)
    process = RouterProcess(RouterConfig(str(tiny_model_dir), MODEL, 512, grpc_port=0, http_port=0, tls=tls))
    try:
        addresses = process.start()
        with TandemClient(addresses.grpc, tls=ClientTls(certificates.ca)) as client:
            assert client.server_info().model == MODEL
        with openai_client(addresses.http, tls_context(certificates.ca)) as client:
            assert [model.id for model in client.models.list()] == [MODEL]
        assert_refused_on_both_ports(addresses, certificates.other_ca, None)
        assert_plain_is_refused(addresses)
    finally:
        process.stop()


# --- cluster token -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["", "0" * 32])
def test_internal_ports_are_closed_to_clients(tiny_keyed: ServedCluster, token: str) -> None:
    options = [("grpc.enable_http_proxy", 0)]
    for metadata in (cluster_metadata(token), (("authorization", f"Bearer {API_KEYS[0]}"),)):
        for worker in tiny_keyed.client.server_info().workers:
            with grpc.insecure_channel(worker.address, options=options) as channel:
                admin = worker_pb2_grpc.WorkerAdminStub(channel)
                with pytest.raises(grpc.RpcError) as refused:
                    admin.CheckIntegrity(worker_pb2.CheckIntegrityRequest(), metadata=metadata, timeout=TIMEOUT_S)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
                if worker.role == "decode":
                    link = channel.stream_stream("/tandem.v1.KvLink/Link")
                    with pytest.raises(grpc.RpcError) as refused:
                        list(link(iter([b""]), metadata=metadata, timeout=TIMEOUT_S))
                    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with grpc.insecure_channel(tiny_keyed.cluster.routers["router-0"].cluster, options=options) as channel:
            control = worker_pb2_grpc.ClusterStub(channel).Control
            impostor = WORKER_CODEC.encode([hello("decode-0", "decode")])
            with pytest.raises(grpc.RpcError) as refused:
                list(control(iter([impostor]), metadata=metadata, timeout=TIMEOUT_S))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert tiny_keyed.client.server_info().ready


# --- API keys ----------------------------------------------------------------------------------------------------

CLOSED = {
    "/v1/models": 200,
    f"/v1/models/{MODEL}": 200,
    "/v1/models/other": 404,
    "/v1/completions": 405,
    "/v1/chat/completions": 405,
    "/metrics": 200,
    "/metrics/decode-0": 200,
    "/sd": 200,
    "/openapi.json": 200,
    "/health/": 404,
    "//health": 404,
    "/nothing": 404,
}
OPEN = ("/health", "/ready", "/docs")
WRONG_HEADERS = (
    {},
    {"authorization": ""},
    {"authorization": "Bearer"},
    {"authorization": "Bearer "},
    {"authorization": f"Bearer {API_KEYS[0]}x"},
    {"authorization": f"Bearer {','.join(API_KEYS)}"},
    {"authorization": f"Basic {API_KEYS[0]}"},
    {"authorization": API_KEYS[0]},
    {"authorization": "Bearer \xe9\xff"},
    {"x-api-key": API_KEYS[0]},
    {"tandem-cluster-token": API_KEYS[0]},
)


@pytest.mark.parametrize("path", CLOSED)
def test_http_requires_a_key(tiny_keyed: ServedCluster, path: str) -> None:
    for headers in WRONG_HEADERS:
        answer = http(tiny_keyed, "GET", path, headers=headers)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert not any(key in answer.body.decode() for key in API_KEYS)
    for scheme, key in (("Bearer", API_KEYS[0]), ("bearer", API_KEYS[1])):
        assert http(tiny_keyed, "GET", path, headers={"authorization": f"{scheme} {key}"}).status == CLOSED[path]


@pytest.mark.parametrize("path", OPEN)
def test_health_and_readiness_are_open(tiny_keyed: ServedCluster, path: str) -> None:
    for headers in WRONG_HEADERS:
        assert http(tiny_keyed, "GET", path, headers=headers).status == 200


def test_worker_metrics_require_a_key(tiny_keyed: ServedCluster) -> None:
    opener = build_opener(ProxyHandler({}))
    for worker in tiny_keyed.client.server_info().workers:
        url = f"http://{worker.metrics_address}/metrics"
        with pytest.raises(HTTPError, match="401"):
            opener.open(url, timeout=TIMEOUT_S)
        with_key = Request(url, headers={"Authorization": f"Bearer {API_KEYS[1]}"})
        assert opener.open(with_key, timeout=TIMEOUT_S).status == 200


def reflect(channel: grpc.Channel, **options: Any) -> list[str]:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=TIMEOUT_S, **options)
    return [service.name for service in answer.list_services_response.service]


def generate(channel: grpc.Channel, **options: Any) -> list[bytes]:
    # Keys are checked before prompts.
    return list(channel.unary_stream(GENERATE)(b"", timeout=TIMEOUT_S, **options))


def server_info(channel: grpc.Channel, **options: Any) -> bytes:
    return channel.unary_unary("/tandem.v1.Inference/GetServerInfo")(b"", timeout=TIMEOUT_S, **options)


@pytest.mark.parametrize("call", [generate, server_info, reflect])
def test_grpc_requires_a_key(tiny_keyed: ServedCluster, call: Callable[..., Any]) -> None:
    with RawGrpc(tiny_keyed.cluster.addresses.grpc) as raw:
        for headers in WRONG_HEADERS:
            metadata = [(name, value) for name, value in headers.items() if value.isascii()]
            with pytest.raises(grpc.RpcError) as refused:
                call(raw.channel, metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert not any(key in refused.value.details() for key in API_KEYS)
        for key in API_KEYS:
            metadata = [("authorization", f"Bearer {key}")]
            if call is generate:
                with pytest.raises(grpc.RpcError) as refused:
                    call(raw.channel, metadata=metadata)
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            else:
                assert call(raw.channel, metadata=metadata)


def test_grpc_health_is_open(tiny_keyed: ServedCluster) -> None:
    with RawGrpc(tiny_keyed.cluster.addresses.grpc) as raw:
        stub = health_pb2_grpc.HealthStub(raw.channel)
        for service in ("", "tandem.v1.Inference", "tandem.prefill", "tandem.decode"):
            request = health_pb2.HealthCheckRequest(service=service)
            assert stub.Check(request, timeout=TIMEOUT_S).status == health_pb2.HealthCheckResponse.SERVING
            watch = stub.Watch(request, timeout=TIMEOUT_S)
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()


def test_reflection_lists_the_services(tiny_keyed: ServedCluster) -> None:
    with RawGrpc(tiny_keyed.cluster.addresses.grpc) as raw:
        services = reflect(raw.channel, metadata=[("authorization", f"Bearer {API_KEYS[0]}")])
    assert {"tandem.v1.Inference", "grpc.health.v1.Health"} <= set(services)
    assert not any("Cluster" in name or "WorkerAdmin" in name for name in services)


def test_clients_send_their_keys(tiny_keyed: ServedCluster) -> None:
    addresses = tiny_keyed.cluster.addresses
    for key in API_KEYS:
        with TandemClient(addresses.grpc, key) as client:
            assert list(client.complete("hi", max_tokens=2))[-1].finish_reason
    with TandemClient(addresses.grpc, "third-key") as client, pytest.raises(TandemError, match="the API key is wrong"):
        list(client.complete("hi"))
    base_url = f"http://{addresses.http}/v1"
    with openai.OpenAI(base_url=base_url, api_key=API_KEYS[1], max_retries=0, timeout=TIMEOUT_S) as client:
        assert client.completions.create(model=MODEL, prompt="hi", max_tokens=2).choices
    with (
        openai.OpenAI(base_url=base_url, api_key="third-key", max_retries=0, timeout=TIMEOUT_S) as client,
        pytest.raises(openai.AuthenticationError, match="the API key is wrong"),
    ):
        client.models.list()


@pytest.mark.parametrize("is_shared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_cache_is_separate_per_key(clusters: Clusters, tiny_config: ClusterConfig, is_shared: bool) -> None:
    served = clusters.get(replace(keyed(tiny_config), share_cache_between_keys=is_shared))
    address, prompt = served.cluster.addresses.grpc, list(range(100))

    def cached(key: str, namespace: str = "") -> int:
        with TandemClient(address, key) as client:
            *_, last = client.complete(prompt, max_tokens=1, cache_namespace=namespace)
        assert last.usage.prompt_tokens == len(prompt)
        return last.usage.cached_tokens

    first, second = API_KEYS
    assert cached(first) == 0
    found = cached(first)
    assert found > 0
    assert cached(second) == (found if is_shared else 0)
    # A client's namespaces are scoped to its key.
    assert cached(first, "tenant") == 0
    assert cached(first, "tenant") == found
    assert cached(second, "tenant") == (found if is_shared else 0)
    served.wait_clean()
