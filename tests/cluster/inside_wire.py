"""Tests that test_nodes.py runs on one of two nodes: they read the cable, Ray's traffic included."""

import os
import time
from dataclasses import replace
from typing import Any

import grpc
import pytest
import trustme

from tandem.client import ClientTls, TandemClient
from tandem.config import ClusterTls
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.joined.remote_cluster import RemoteCluster
from tandem.deploy.joined.supervisor_actor import ENDED
from tandem.deploy.on_ray.hosted_ray import HostedRay
from tandem.deploy.on_ray.ray_base import RayBase
from tandem.router.config import host_of
from tandem.rpc.auth import cluster_metadata
from tandem.v1 import worker_pb2, worker_pb2_grpc
from tests.cluster.conftest import RESTART_S, ServedCluster, wait_until
from tests.cluster.inside import OPTIONS
from tests.cluster.test_internal_tls import TIMEOUT_S, ports_inside, strangers
from tests.cluster.test_wire_capture import API_KEY, MAX_TOKENS, PROMPT, kv_patterns, looked_for, prompt_ids
from tests.cluster.two_hosts import HEAD, OTHER, RAY_PORT, TOKEN
from tests.cluster.wire_capture import WireCapture

__all__ = ["kv_patterns", "prompt_ids"]

pytestmark = pytest.mark.timeout(170)

# Sent by clients and cluster processes; carried by Ray.
SAID = {"prompt", "token ids", "KV", "API key", "cluster token"}
CARRIED = {"API key", "cluster token", "private key"}
RAYS_OWN = {"Ray's token"}


@pytest.fixture(scope="module")
def config(tiny_config: ClusterConfig) -> ClusterConfig:
    return replace(
        tiny_config,
        ray_address=f"{HEAD}:{RAY_PORT}",
        placement_strategy="spread",
        host="0.0.0.0",
        num_routers=2,
        api_keys=(API_KEY,),
        internal_tls="off",
    )


@pytest.fixture(scope="module")
def client_tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the paths of a server's certificate and key, and of their authority."""
    directory = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    server = authority.issue_cert(HEAD, OTHER)
    blobs = {"ca": authority.cert_pem, "tls_cert": server.cert_chain_pems[0], "tls_key": server.private_key_pem}
    for name, blob in blobs.items():
        blob.write_to_path(str(directory / name))
    return {name: str(directory / name) for name in blobs}


def in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Create processes with their full configuration, as on a single-host Ray."""
    monkeypatch.setattr(HostedRay, "create", RayBase.create)


def found(
    config: ClusterConfig, ca: str, prompt_ids: list[int], kv_patterns: list[bytes]
) -> tuple[set[str], dict[str, str]]:
    """Return the secrets seen on the cable over a cluster's life, and the refusals of strangers.

    The strangers try the internal ports of the other host.
    """
    began = time.monotonic()
    with WireCapture(os.environ["TANDEM_TEST_INTERFACE"]) as capture:
        served = ServedCluster(config, ClientTls(ca) if ca else None)
        try:
            served.wait_ready()
            fail_to_start(config)
            wait_until(lambda: len(served.client.server_info().routers) == 2, RESTART_S, "both routers are there")
            secrets = looked_for(served, prompt_ids, kv_patterns) | {"Ray's token": [TOKEN.encode()]}
            if isinstance(tls := served.cluster.cluster_tls, ClusterTls):
                secrets["private key"] = [line for line in tls.key.splitlines() if b"-----" not in line]
            info = served.client.server_info()
            assert {host_of(worker.address) for worker in info.workers} == {HEAD, OTHER}
            for router in info.routers:
                with TandemClient(router.grpc_address, API_KEY, ClientTls(ca) if ca else None, one_router=True) as one:
                    answer = list(one.complete(PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True))
                assert len(answer) > 0 and answer[-1].finish_reason
            wait_until(lambda: num_shipped(served) >= len(PROMPT) // 16, TIMEOUT_S, "its pages have crossed the cable")
            refusals = try_to_get_in(served) if config.internal_tls == "on" else {}
            served.wait_clean()
        finally:
            served.close()
    connections = capture.connections()
    seen = {name for name, patterns in secrets.items() if any(p in said for said in connections for p in patterns)}
    print(
        f"internal TLS {config.internal_tls}: {sum(map(len, connections)) / 1e6:.2f} MB of {len(connections)} sides of "
        f"connections and other frames in {time.monotonic() - began:.0f} s; looked for {len(secrets)}; seen: "
        f"{', '.join(sorted(seen))}",
        flush=True,
    )
    return seen, refusals


def num_shipped(served: ServedCluster) -> int:
    return sum(shipped.num_pages for worker in served.client.server_info().workers for shipped in worker.stats.shipped)


def fail_to_start(config: ClusterConfig) -> None:
    """Give a supervisor actor a configuration with the same API key and a missing model."""
    few: dict[str, Any] = {"num_prefill": 0, "num_decode": 0, "num_both": 1, "num_routers": 1}
    cluster = RemoteCluster.create(replace(config, **few, model="/nowhere/at-all", cluster_name="without-a-model"))
    state = wait_until(lambda: (s := cluster.look()) and s.phase == ENDED and s, RESTART_S, "it has failed")
    assert "/nowhere/at-all" in state.error
    cluster.end()


def try_to_get_in(served: ServedCluster) -> dict[str, str]:
    """Return the statuses that strangers with the token get, by port and kind."""
    inside = ports_inside(served)
    inside["router-1"] = served.cluster.routers["router-1"].cluster
    far = {name: address for name, address in inside.items() if host_of(address) == HEAD}
    assert len(far) == 2, "a router and a worker are across the cable"
    told = {}
    for name, address in far.items():
        for kind, credentials in strangers(served).items():
            channel = (
                grpc.secure_channel(address, credentials, OPTIONS)
                if credentials
                else grpc.insecure_channel(address, OPTIONS)
            )
            with channel, pytest.raises(grpc.RpcError) as refused:
                worker_pb2_grpc.WorkerAdminStub(channel).CheckIntegrity(
                    worker_pb2.CheckIntegrityRequest(),
                    metadata=cluster_metadata(served.cluster.cluster_token),
                    timeout=TIMEOUT_S,
                )
            told[f"{name}, {kind}"] = refused.value.code().name
    return told


def test_plain_cluster_is_readable(config: ClusterConfig, prompt_ids: list[int], kv_patterns: list[bytes]) -> None:
    seen, _ = found(config, "", prompt_ids, kv_patterns)
    assert seen == SAID | RAYS_OWN


def test_ray_traffic_is_readable(
    config: ClusterConfig,
    client_tls: dict[str, str],
    prompt_ids: list[int],
    kv_patterns: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_the_clear(monkeypatch)
    seen, _ = found(with_tls(config, client_tls), client_tls["ca"], prompt_ids, kv_patterns)
    assert seen == CARRIED | RAYS_OWN


def test_tls_hides_the_cluster_and_refuses_strangers(
    config: ClusterConfig, client_tls: dict[str, str], prompt_ids: list[int], kv_patterns: list[bytes]
) -> None:
    """Ray's own token stays readable unless Ray has TLS."""
    seen, refusals = found(with_tls(config, client_tls), client_tls["ca"], prompt_ids, kv_patterns)
    assert seen == RAYS_OWN
    assert len(refusals) == 6 and set(refusals.values()) == {"UNAVAILABLE"}, refusals


def with_tls(config: ClusterConfig, client_tls: dict[str, str]) -> ClusterConfig:
    return replace(config, internal_tls="on", tls_cert=client_tls["tls_cert"], tls_key=client_tls["tls_key"])
