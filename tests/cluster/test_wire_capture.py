"""Traffic between cluster processes is unreadable with TLS. inside_wire.py covers Ray's traffic."""

import os
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

import pytest

from tandem.both_worker.local_worker import LocalWorker
from tandem.client import ClientTls
from tandem.decode_worker.config import DecodeConfig
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.messages import FirstToken, WorkerMessage
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams
from tests.cluster.conftest import CHUNK_SIZE, NUM_PAGES, RESTART_S, Clusters, Oracle, ServedCluster, wait_until
from tests.cluster.faults import cut_control, cut_links
from tests.cluster.test_keys_and_tls import tls_context
from tests.cluster.wire_capture import WireCapture
from tests.conftest import Certificates

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may capture what travels"),
]

PROMPT = "Nobody else is to read what the heron told the miller about the flood of 1853."
API_KEY = "a-key-that-nobody-may-see"
MAX_TOKENS = 8
# Length of a searched piece of a KV page; such pieces are unique.
PATTERN_BYTES = 64


@pytest.fixture(scope="module")
def prompt_ids(tiny_oracle: Oracle) -> list[int]:
    return list(tiny_oracle.tokenizer.encode(PROMPT).ids)


@pytest.fixture(scope="module")
def kv_patterns(tiny_model_dir: Path, prompt_ids: list[int]) -> list[bytes]:
    """Return pieces of the prompt's KV pages."""
    engine = build_engine(EngineConfig(str(tiny_model_dir), num_pages=NUM_PAGES, num_threads=1), "wire", lambda _: None)
    told: list[WorkerMessage] = []
    worker = LocalWorker(engine, PrefillConfig(chunk_size=CHUNK_SIZE), DecodeConfig(), told.append)
    worker.submit("r", prompt_ids, SamplingParams(max_tokens=1))
    worker.run_until(lambda: any(isinstance(message, FirstToken) for message in told), 30.0)
    pages = [bytes(page.numpy()) for page in engine.pool.memory if page.any()]
    engine.pool.close()
    assert len(pages) >= len(prompt_ids) // 16
    return [page[256 : 256 + PATTERN_BYTES] for page in pages]


def varints(ids: list[int]) -> bytes:
    packed = bytearray()
    for number in ids:
        while number > 127:
            packed.append(number & 127 | 128)
            number >>= 7
        packed.append(number)
    return bytes(packed)


def looked_for(served: ServedCluster, prompt_ids: list[int], kv_patterns: list[bytes]) -> dict[str, list[bytes]]:
    return {
        "prompt": [PROMPT.encode()],
        "token ids": [varints(prompt_ids)],
        "KV": kv_patterns,
        "API key": [API_KEY.encode()],
        "cluster token": [served.cluster.cluster_token.encode()],
    }


def found(served: ServedCluster, certificates: Certificates | None, secrets: dict[str, list[bytes]]) -> set[str]:
    """Return the secrets readable while the cluster serves and is monitored."""
    context = tls_context(certificates.ca) if certificates else None
    opener = build_opener(ProxyHandler({}), *([HTTPSHandler(context=context)] if context else []))
    address = f"{'https' if context else 'http'}://{served.cluster.addresses.http}"
    with WireCapture() as capture:
        # New streams and links authenticate again.
        for cut in (cut_control, cut_links):
            cut(served, "decode-0")
            wait_until(lambda: served.client.server_info().ready, RESTART_S, "they are there again")
        answer = list(served.client.complete(PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True))
        assert answer[-1].handover.pages_shipped >= 4
        for path in ("/metrics", "/sd"):
            request = urllib.request.Request(address + path, headers={"Authorization": f"Bearer {API_KEY}"})
            with opener.open(request, timeout=5.0) as response:
                assert response.status == 200
    connections = capture.connections()
    assert sum(map(len, connections)) > 50_000
    return {name for name, patterns in secrets.items() if any(p in said for said in connections for p in patterns)}


@pytest.fixture
def config(tiny_config: ClusterConfig) -> ClusterConfig:
    return replace(tiny_config, api_keys=(API_KEY,), transport="tcp")


@pytest.fixture
def plain(clusters: Clusters, config: ClusterConfig) -> Iterator[ServedCluster]:
    yield clusters.get(config)


@pytest.fixture
def encrypted(clusters: Clusters, config: ClusterConfig, certificates: Certificates) -> Iterator[ServedCluster]:
    tls: dict[str, Any] = {"tls_cert": certificates.cert, "tls_key": certificates.key, "internal_tls": "on"}
    yield clusters.get(replace(config, **tls), ClientTls(certificates.ca))


def test_plain_cluster_is_readable(plain: ServedCluster, prompt_ids: list[int], kv_patterns: list[bytes]) -> None:
    secrets = looked_for(plain, prompt_ids, kv_patterns)
    assert found(plain, None, secrets) == secrets.keys()


def test_encrypted_cluster_is_unreadable(
    encrypted: ServedCluster, certificates: Certificates, prompt_ids: list[int], kv_patterns: list[bytes]
) -> None:
    secrets = looked_for(encrypted, prompt_ids, kv_patterns)
    assert found(encrypted, certificates, secrets) == set()
