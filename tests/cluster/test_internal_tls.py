"""A cluster with internal TLS serves like any other and admits only its own processes."""

import json
import random
import socket
import ssl
import time
from urllib.error import HTTPError
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

import grpc
import pytest

from tandem.deploy.host.certificates import make_certificates
from tandem.rpc.auth import cluster_metadata
from tandem.v1 import worker_pb2, worker_pb2_grpc
from tests.cluster.conftest import Oracle, ServedCluster, random_ids, wait_until
from tests.cluster.inside import OPTIONS
from tests.conftest import Certificates

TIMEOUT_S = 5.0


def test_tokens_match_transformers(tiny_tls: ServedCluster, tiny_oracle: Oracle) -> None:
    rng = random.Random(5)
    for num_tokens in (1, 40, 100):
        prompt = random_ids(rng, num_tokens)
        answer = tiny_tls.complete(prompt, max_tokens=16)
        assert answer.token_ids == tiny_oracle.generate(prompt, 16)
        assert answer.last.handover.pages_shipped > 0
    # Arrives with the next heartbeat.
    shipped = wait_until(lambda: transports(tiny_tls), TIMEOUT_S, "the router knows that pages were shipped")
    assert shipped == {"tcp"}


@pytest.mark.slow
def test_dead_workers_return(tiny_tls: ServedCluster, tiny_oracle: Oracle) -> None:
    prompt = random_ids(random.Random(6), 60)
    for worker_id in ("decode-0", "prefill-0"):
        pid = tiny_tls.kill(worker_id)
        wait_until(lambda pid=pid: pid not in pids(tiny_tls), TIMEOUT_S, "the router has noticed")
        tiny_tls.wait_ready()
        assert tiny_tls.complete(prompt, max_tokens=16).token_ids == tiny_oracle.generate(prompt, 16)


def transports(served: ServedCluster) -> set[str]:
    return {shipped.transport for worker in served.client.server_info().workers for shipped in worker.stats.shipped}


def pids(served: ServedCluster) -> set[int]:
    return {worker.pid for worker in served.client.server_info().workers if worker.alive}


def ports_inside(served: ServedCluster) -> dict[str, str]:
    addresses = {worker.worker_id: worker.address for worker in served.client.server_info().workers}
    return addresses | {"router-0": served.cluster.routers["router-0"].cluster}


def strangers(served: ServedCluster) -> dict[str, grpc.ChannelCredentials | None]:
    assert served.cluster.cluster_tls is not None
    ours, other = served.cluster.cluster_tls.read(), make_certificates()
    return {
        "plain": None,
        "no certificate": grpc.ssl_channel_credentials(ours.ca),
        "another cluster's": grpc.ssl_channel_credentials(ours.ca, other.key, other.cert),
    }


def test_prometheus_scrapes_workers_through_the_router(tiny_tls: ServedCluster, certificates: Certificates) -> None:
    assert {worker.metrics_address for worker in tiny_tls.client.server_info().workers} == {""}
    here = tiny_tls.cluster.addresses.http
    context = ssl.create_default_context(cafile=certificates.ca)
    context.load_cert_chain(certificates.client_cert, certificates.client_key)
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))

    def read(path: str) -> str:
        with opener.open(f"https://{here}{path}", timeout=TIMEOUT_S) as answer:
            text: str = answer.read().decode()
        return text

    targets = {target["labels"]["process"]: target for target in json.loads(read("/sd"))}
    assert targets.keys() == {"router-0", "prefill-0", "decode-0"}
    for name in ("prefill-0", "decode-0"):
        target = targets[name]
        assert (target["targets"], target["labels"]["__scheme__"]) == ([here], "https")
        assert f'worker="{name}"' in read(target["labels"]["__metrics_path__"])
    with pytest.raises(HTTPError, match="404"):
        read("/metrics/decode-1")


def test_token_alone_opens_no_port(tiny_tls: ServedCluster) -> None:
    metadata = cluster_metadata(tiny_tls.cluster.cluster_token)
    for address in ports_inside(tiny_tls).values():
        for credentials in strangers(tiny_tls).values():
            began = time.monotonic()
            with (
                grpc.secure_channel(address, credentials, OPTIONS)
                if credentials
                else grpc.insecure_channel(address, OPTIONS) as channel,
                pytest.raises(grpc.RpcError) as refused,
            ):
                worker_pb2_grpc.WorkerAdminStub(channel).CheckIntegrity(
                    worker_pb2.CheckIntegrityRequest(), metadata=metadata, timeout=TIMEOUT_S
                )
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert time.monotonic() - began < TIMEOUT_S / 2
    # Certificate and token together are admitted.
    assert tiny_tls.integrity().keys() == {"prefill-0", "decode-0"}


@pytest.mark.slow
def test_silent_connections_are_closed(tiny_tls: ServedCluster) -> None:
    silent = []
    for address in ports_inside(tiny_tls).values():
        host, port = address.split(":")
        silent += [socket.create_connection((host, int(port)), 15.0) for _ in range(20)]
    assert tiny_tls.complete([5, 6, 7], max_tokens=4).token_ids
    for connection in silent:
        with connection:
            assert connection.recv(1) == b""
