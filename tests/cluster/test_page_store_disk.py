"""Clusters and stores restarted on the disk of a page store."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.conftest import API_KEYS, Clusters, Oracle, ServedCluster, random_ids, wait_until
from tests.cluster.test_page_store import NUM_PROMPTS, PROMPT_TOKENS, pid_of, serve, store_metrics, with_store
from tests.cluster.test_restart import finish
from tests.cluster.wire import http

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def wait_on_disk(served: ServedCluster, prompts: Sequence[Sequence[int]]) -> None:
    """Waits until the store's disk holds the prompts' pages."""
    num_pages = sum(len(ids) // 16 for ids in prompts)

    def is_written() -> bool:
        metrics = store_metrics(served)
        return metrics.get("disk_pages", 0) >= num_pages and not metrics["disk_queue_pages"]

    wait_until(is_written, 20.0, "the prompts' pages are on disk")


def is_shown(served: ServedCluster) -> bool:
    metrics = store_metrics(served)
    (store,) = served.client.server_info().stores
    assert (store.store_id, store.pid, store.address) == (
        "store-0",
        pid_of(served, "store-0"),
        served.cluster.store_address,
    )
    shown = (store.num_host_pages, store.num_disk_pages, store.num_disk_bytes)
    return store.alive and shown == (metrics["slots.ready"], metrics["disk_pages"], metrics["disk_bytes"])


def check_metrics_through_the_router(served: ServedCluster) -> None:
    """With TLS inside, Prometheus has no certificate of the cluster."""
    (store,) = served.client.server_info().stores
    assert not store.metrics_address
    key = {"Authorization": f"Bearer {API_KEYS[0]}"}
    targets = {target["labels"]["process"]: target for target in http(served, "GET", "/sd", headers=key).json}
    path = targets["store-0"]["labels"]["__metrics_path__"]
    assert b'tandem_store_disk_up{store="store-0"} 1.0' in http(served, "GET", path, headers=key).body


def check_restart(served: ServedCluster, oracle: Oracle, prompts: Sequence[list[int]]) -> None:
    pid = pid_of(served, "store-0")
    assert finish(served.cluster.restart("store-0")) == ["store-0: starting again", "store-0: ready"]
    assert pid_of(served, "store-0") != pid
    wait_on_disk(served, prompts)
    serve(served, oracle, prompts[:2])
    served.wait_clean()


def test_a_cluster_restarted_on_the_same_disk_answers_from_it(
    clusters: Clusters, tiny_config: ClusterConfig, tiny_oracle: Oracle, tmp_path: Path
) -> None:
    # A process keeps one cluster at a time.
    clusters.close()
    rng = random.Random(0)
    prompts = [random_ids(rng, PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]
    # With keys, the cache namespaces are the same only by the folder's secret.
    config = replace(
        with_store(tiny_config),
        num_prefill=0,
        num_decode=0,
        num_both=1,
        store_disk=f"{tmp_path / 'pages'}:64MiB",
        api_keys=API_KEYS,
    )
    for is_second in (False, True):
        # With and without TLS inside, pages are the same.
        served = ServedCluster(replace(config, internal_tls="on") if is_second else config)
        try:
            if is_second:
                wait_on_disk(served, prompts)
            answers = []
            for i, ids in enumerate(prompts):
                answers += serve(served, tiny_oracle, [ids])
                # Before the next evict its pages.
                wait_on_disk(served, prompts[: i + 1])
            num_cached = [answer.last.usage.cached_tokens for answer in answers]
            # The first is loaded, but for the last page, of which a token is computed. Later, computing may be faster.
            num_loaded = PROMPT_TOKENS // 16 - 1 if is_second else 0
            assert num_cached[0] == 16 * num_loaded and (is_second or not sum(num_cached))
            metrics = store_metrics(served)
            assert metrics["disk_up"] == 1 and metrics["disk_moved_pages_total.failed"] == 0
            assert metrics["hit_pages_total.disk"] >= num_loaded and (is_second or not metrics["hit_pages_total.disk"])
            served.wait_clean()
            # With the store's next beat.
            wait_until(lambda: is_shown(served), 5.0, "the router knows what the store holds")  # noqa: B023
            if is_second:
                check_metrics_through_the_router(served)
                check_restart(served, tiny_oracle, prompts)
        finally:
            served.close()
